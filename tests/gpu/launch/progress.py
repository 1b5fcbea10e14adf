"""Runs ops whose CTAs wait for each other where they may not run concurrently.

    python -m tests.gpu.launch.progress streams | green

test_progress.py runs this file as a subprocess, because a launch that hangs has to be killed. A wrong byte is an error.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from mxep.core_kernels.fold.both.plan import quantize_both_fold, tiles_across
from mxep.torch_frontend import force_implementation, ops
from torch import Tensor
from torch.cuda.green_contexts import GreenContext

from ..cases import DEVICE, floats

Tensors = tuple[Tensor, ...]
WIDTHS = ((torch.bfloat16, 16384), (torch.float32, 7168), (torch.bfloat16, 7168))
"""128, 112 and 56 tiles per row. An H100 or H200 runs 264 CTAs at a time; eight of its SMs run 16."""
ROWS = (256, 1056, 4096)


def inputs(rows: int, width: int, dtype: torch.dtype) -> Tensors:
    """Three groups of whole blocks, one of them empty, and 32 rows past the last group."""
    x = floats(np.random.default_rng(rows + width), rows, width, dtype=dtype).to(DEVICE)
    ends = torch.tensor([rows // 3, rows // 3, rows - 32], dtype=torch.int32) // 32 * 32
    return x, ends.to(DEVICE)


def cases() -> Iterator[tuple[str, Callable[..., Tensors], Tensors, Tensors]]:
    """Yields a description, the op up to the last end, its inputs, and the outputs of the ops that it combines."""
    for dtype, width in WIDTHS:
        for rows in ROWS:
            given = inputs(rows, width, dtype)
            run = partial(specified, given[1].cpu())
            with force_implementation("triton"):
                want = run(*given)
            across = tiles_across(width, str(dtype).removeprefix("torch."))
            yield f"{rows} x {width} {dtype}, {across} tiles across", run, given, want


def specified(ends: Tensor, *given: Tensor) -> Tensors:
    """The outputs of the op up to the last end. ends: on the CPU, so that nothing waits for the device."""
    return tuple(quantize_both_fold.specified((ends,), ops.quantize_both_fold(*given)))


def wrong_bytes(got: Tensors, want: Tensors) -> Tensor:
    return torch.stack([g.ne(w).sum() for g, w in zip(got, want, strict=True)]).sum()


def grouped_gemm() -> Callable[[], Tensor]:
    """Returns a call of a grouped GEMM that occupies the whole device."""
    rng = torch.Generator().manual_seed(1)
    lhs, rhs = (torch.randn(shape, generator=rng).bfloat16().to(DEVICE) for shape in ((4096, 2048), (4, 2048, 2048)))
    operands = *ops.quantize_row_fold(lhs), *ops.quantize_row_fold(rhs)
    ends = torch.tensor([1000, 1000, 3000, 4096], dtype=torch.int32, device=DEVICE)
    return lambda: ops.grouped_mm_fold(*operands, ends)


def streams() -> None:
    """Eight streams with four priorities. Each runs the ops, GEMMs, sleeps and comparisons in another order."""
    all_cases, multiply = list(cases()), grouped_gemm()
    want_gemm = multiply()
    side = [torch.cuda.Stream(priority=-(i % 4)) for i in range(8)]
    wrong = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in side]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for turn in range(6 * len(all_cases)):
        gate = torch.cuda.Event()
        torch.cuda._sleep(10_000_000)  # about 5 ms, enough to enqueue the work of every stream
        gate.record()
        for i, stream in enumerate(side):
            with torch.cuda.stream(stream), force_implementation("cuda"):
                stream.wait_event(gate)
                if (turn + i) % 3 == 0:
                    torch.cuda._sleep(20_000 * i)
                _, op, given, want = all_cases[(turn + 5 * i) % len(all_cases)]
                got = [op(*given) for _ in range(3)]
                if (turn + i) % 4 == 0:
                    wrong[i] += multiply().ne(want_gemm).sum()
                for outputs in got:
                    wrong[i] += wrong_bytes(outputs, want)
    torch.cuda.synchronize()
    found = [int(n) for n in wrong]
    print(f"streams: {time.perf_counter() - begin:.2f} s, wrong bytes by stream: {found}")
    assert not any(found)


def green() -> None:
    """A green context of eight SMs: most tiles of a row start after other tiles have finished."""
    context = GreenContext.create(num_sms=8, device_id=torch.cuda.current_device())

    def ms(run: Callable[[], Tensors]) -> tuple[float, Tensors]:
        """Time and outputs of the second of two runs. The first loads the kernel and allocates memory."""
        run()
        torch.cuda.current_stream().synchronize()
        begin = time.perf_counter()
        got = run()
        torch.cuda.current_stream().synchronize()
        return 1e3 * (time.perf_counter() - begin), got

    for name, op, given, want in cases():
        with force_implementation("cuda"):
            whole_ms, _ = ms(lambda op=op, given=given: op(*given))
            context.set_context()
            green_ms, got = ms(lambda op=op, given=given: op(*given))
            context.pop_context()
        torch.cuda.synchronize()
        print(f"green: {name}: {green_ms:.2f} ms, on the whole device {whole_ms:.2f} ms", flush=True)
        assert int(wrong_bytes(got, want)) == 0


if __name__ == "__main__":
    {"streams": streams, "green": green}[sys.argv[1]]()
