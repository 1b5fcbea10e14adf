"""The grouped GEMM alone: `grouped_mm` in MXFP8 against torch's own in bf16, forward and backward.

    python examples/integrations/grouped_gemm.py                                              # a GPU, or small on a CPU
    python examples/integrations/grouped_gemm.py --rows 65536 --k 7168 --n 2048 --groups 32

out = x w^T for each group of rows: x (M, K) bf16, w (G, N, K) bf16. `grouped_mm` quantizes x and w in every call, and
its time includes that. SQNR: signal to noise in dB, against torch's product in fp32 of the same bf16 values.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from mxep.torch_frontend import grouped_mm
from torch import Tensor

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
WAYS: dict[str, Multiply] = {
    # torch's public name of torch._grouped_mm. It takes (G, K, N): a transposed view, no copy.
    "torch, bf16": lambda x, w, ends: F.grouped_mm(x, w.mT, offs=ends),
    "mxep, bf16": lambda x, w, ends: grouped_mm(x, w, ends, recipe="bf16"),
    "mxep, mxfp8": lambda x, w, ends: grouped_mm(x, w, ends, recipe="mxfp8"),
}


def sqnr_db(got: Tensor, want: Tensor) -> float:
    return float(10 * torch.log10(want.float().square().sum() / (got.float() - want.float()).square().sum()))


def reference(x: Tensor, w: Tensor, dy: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw in fp32, a group at a time."""
    x, w, dy = x.detach().float(), w.detach().float(), dy.float()
    groups = list(zip(x.split(sizes), w, dy.split(sizes), strict=True))
    y = torch.cat([rows @ matrix.T for rows, matrix, _ in groups])
    dx = torch.cat([grad @ matrix for _, matrix, grad in groups])
    return y, dx, torch.stack([grad.T @ rows for rows, _, grad in groups])


def milliseconds(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of `repeats` calls, after one call that compiles. Reads the clock when the device has finished."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def main(argv: Sequence[str] | None = None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, k, n, groups = (131072, 7168, 2048, 32) if device.type == "cuda" else (512, 128, 96, 4)
    flags = argparse.ArgumentParser(prog="grouped_gemm.py", description="Grouped GEMM in MXFP8 against bf16.")
    for name, size in {"rows": rows, "k": k, "n": n, "groups": groups, "repeats": 10}.items():
        flags.add_argument(f"--{name}", type=int, default=size, metavar="N", help=f"default: {size}")
    args = flags.parse_args(argv)
    for name, unit in {"rows": 1, "k": 32, "n": 32, "groups": 1, "repeats": 1}.items():
        value = getattr(args, name)
        if value < 1 or value % unit:
            flags.error(f"--{name}: got {value}; allowed: " + ("at least 1" if unit == 1 else f"multiples of {unit}"))

    torch.manual_seed(0)
    cuts = torch.randint(args.rows + 1, (args.groups - 1,)).sort().values.tolist()  # groups of any size, also empty
    bounds = [0, *cuts, args.rows]
    sizes = [end - start for start, end in pairwise(bounds)]
    options = {"dtype": torch.bfloat16, "device": device}
    x = torch.randn(args.rows, args.k, **options).requires_grad_()
    w = (torch.randn(args.groups, args.n, args.k, **options) * args.k**-0.5).requires_grad_()
    dy = torch.randn(args.rows, args.n, **options)
    ends = torch.tensor(bounds[1:], dtype=torch.int32, device=device)
    want = reference(x, w, dy, sizes)

    print(f"{device}: {args.rows} rows, K {args.k}, N {args.n}, {args.groups} groups")
    print(f"{'':14}{'y dB':>8}{'dx dB':>8}{'dw dB':>8}{'fwd + bwd ms':>15}")
    for name, multiply in WAYS.items():

        def step(multiply: Multiply = multiply) -> tuple[Tensor, ...]:
            y = multiply(x, w, ends)
            return y.detach(), *torch.autograd.grad(y, (x, w), dy)

        decibels = [sqnr_db(got, exact) for got, exact in zip(step(), want, strict=True)]
        ms = milliseconds(step, device, args.repeats)
        print(f"{name:14}" + "".join(f"{db:8.1f}" for db in decibels) + f"{ms:15.2f}", flush=True)


if __name__ == "__main__":
    main()
