"""The frontend without private names of torch, in forks of one process; `python without_private.py cpu [more]|cuda`.

    torch imported --fork--> names hidden --> mxep.torch_frontend imported --> layer, forward and backward --> digest

Prints a JSON object: what is hidden ("", a half of the names, or "all") -> the digest of all bytes, or the error.
"ranks" and "ranks all" are of two ranks of a CPU that share the layer's experts.
"""

import hashlib
import json
import os
import pkgutil
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
import triton  # noqa: F401 -- imported once, before the forks
from mxep import core_kernels, cpp_bindings  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

PACKAGE = Path(__file__).parents[3] / "torch_frontend"
FILES = "ops/private.py", "overlap/symmetric.py"
"""The files that name private parts of torch."""
NAMES = sorted({n for f in FILES for n in re.findall(r'\bprivate\("([^"]+)"\)', (PACKAGE / f).read_text())})

BITS = range((len(NAMES) - 1).bit_length())
HALVES = {
    f"{bit}:{value}": {n for i, n in enumerate(NAMES) if i >> bit & 1 == value} for bit in BITS for value in (0, 1)
}
"""By the bits of their numbers: every name is hidden, and of two names each is hidden where the other is not."""


@contextmanager
def hiding(hidden: set[str]) -> Iterator[None]:
    """Within the block `private` finds none of these names; the package has to look for all of them."""
    resolve, missed = pkgutil.resolve_name, set()

    def look_up(name: str) -> Any:
        if name in hidden:
            missed.add(name)
            raise AttributeError(name)
        return resolve(name)

    with mock.patch.object(pkgutil, "resolve_name", look_up):
        yield
    assert missed == hidden, hidden - missed


def digest(*tensors: torch.Tensor) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total.update(local.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def layer(device: str, ranks: int = 1) -> str:
    """A layer of each kind of recipe: outputs, gradients, an evaluation with cached weights."""
    import mxep.torch_frontend as mx

    found = []
    for recipe in ("mxfp8", "mxfp8_wgrad_with_hp", "bf16"):
        torch.manual_seed(0)
        moe = mx.MoE(64, 32, num_experts=4, router=mx.RouterConfig(top_k=2), recipe=recipe).to(device)
        x = torch.randn(96, 64, device=device, requires_grad=True)
        if ranks > 1:
            parallelize_module(moe, init_device_mesh(device, (ranks,)), mx.ExpertParallel())
        y, _ = moe(x)
        y.square().sum().backward()
        with torch.no_grad(), moe.cached_weights():
            evaluated, _ = moe(x)
        found += [y, x.grad, evaluated, *(p.grad for p in moe.parameters())]
    rows = mx.MXTensor.quantize(x.detach().requires_grad_())
    found += [rows.q, rows.sf, rows.dequantize(), rows.sum()]
    return digest(*found)


def errors() -> str:
    """What an op refuses stays refused."""
    import mxep.torch_frontend as mx
    from torch.autograd import forward_ad

    x = torch.ones(2, 32, requires_grad=True)
    row = mx.ops.quantize_row(x)[0]
    assert row.dtype == torch.uint8
    values = mx.ops.dequantize(*(t.detach() for t in mx.ops.quantize_row(x)), "float32")
    assert not values.requires_grad
    gathered = mx.ops.permute_rows(x, torch.tensor([1, 0], dtype=torch.int32))
    for refused in (
        lambda: gathered.sum().backward(),
        lambda: torch.func.grad(lambda t: mx.MXTensor.quantize(t).dequantize().sum())(x),
        lambda: _forward_mode(forward_ad, mx.ops.permute_rows, x),
        lambda: mx.ops.quantize_row(torch.ones(2, 32).to_sparse()),
    ):
        try:
            refused()
        except (NotImplementedError, RuntimeError, ValueError):
            continue
        raise AssertionError("nothing was raised")
    return ""


def _forward_mode(forward_ad: Any, op: Callable[..., Any], x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        op(forward_ad.make_dual(x, x), torch.tensor([1, 0], dtype=torch.int32))


def rank(index: int, ranks: int, store: str) -> str:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=ranks)
    from mxep.torch_frontend.integrations.torchao import a2a_dispatch_mxfp8_fwd_hp_bwd

    assert dist.group.WORLD is not None
    x, splits = torch.randn(2 * ranks, 32, generator=torch.Generator().manual_seed(index)), [2] * ranks
    for group in (dist.group.WORLD, dist.group.WORLD.group_name):
        received = a2a_dispatch_mxfp8_fwd_hp_bwd(x, splits, splits, group)
    found = digest(received.q, received.sf) + layer("cpu", ranks)
    dist.destroy_process_group()
    return found


def forked(hidden: set[str], run: Callable[[], str]) -> int:
    """A fork that writes the run's result to the file descriptor returned."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            with hiding(hidden):
                found = run()
        except BaseException:
            found = traceback.format_exc()
        os.write(writer, found[-4000:].encode())
        os._exit(0)
    os.close(writer)
    return reader


def result(reader: int) -> str:
    with os.fdopen(reader, "rb") as stream:
        found = stream.read().decode()
    os.wait()
    return found


def main(device: str, *more: str) -> dict[str, str]:
    if device == "cuda":
        return on_gpu()
    cases = {"": set(), "all": set(NAMES)}
    return on_cpu({"": set(), **HALVES}) | over_ranks(cases) if more else on_cpu(cases)


def on_cpu(cases: dict[str, set[str]]) -> dict[str, str]:
    return {name: result(forked(hidden, lambda: layer("cpu") + errors())) for name, hidden in cases.items()}


def over_ranks(cases: dict[str, set[str]]) -> dict[str, str]:
    found = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            pair = [forked(cases[case], lambda i=i, at=f"{folder}/store": rank(i, 2, at)) for i in range(2)]
            found[f"ranks {case}".strip()] = " ".join(map(result, pair))
    return found


def on_gpu() -> dict[str, str]:
    """Without the table of DLPack no op runs in CUDA C++, and a product in Triton has other bytes."""

    def in_triton() -> str:
        from mxep.torch_frontend import force_implementation

        with force_implementation("triton"):
            return layer("cuda")

    all_but_table = {name for name in NAMES if "dlpack" not in name}
    return {
        "": result(forked(set(), lambda: layer("cuda"))),
        "all but the table": result(forked(all_but_table, lambda: layer("cuda"))),
        "in triton": result(forked(set(), in_triton)),
        "all": result(forked(set(NAMES), lambda: layer("cuda"))),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
