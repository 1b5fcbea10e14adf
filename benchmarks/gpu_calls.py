"""What all GPU cases use: ops by name in either frontend, a copy to compare with, and failures that end nothing."""

import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import torch
from mxep.jax_frontend import _call as jax_launch
from mxep.jax_frontend import ops as jax_ops
from mxep.torch_frontend import ops as torch_ops
from torch import Tensor

from . import device_timing
from .gpu_cases import Tensors
from .timing import Sample

Each = Callable[[device_timing.Candidates], dict[str, Sample]]
EPS = 2.0**-23
# Copied piece by piece: the two buffers of a whole would not fit beside the largest case.
COPY_NBYTES = {"cuda": 4 << 30, "cpu": 1 << 20}
CHUNK = 1 << 28


def torch_call(op: str, *tensors: Tensor, **options: Any) -> Tensors:
    outputs = getattr(torch_ops, op)(*tensors, **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def jax_call(op: str, *arrays: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    return jax_launch.call(jax_ops.OPS[op], *arrays, **options)


def torch_wait(device: str) -> Callable[[object], None]:
    """What waits for torch's stream, whatever was returned."""
    return (lambda _: torch.cuda.synchronize()) if device == "cuda" else lambda _: None


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def differing(a: Tensor, b: Tensor) -> int:
    """How many values have other bits; by chunks, or the comparison would need as much memory as the outputs."""
    pairs = zip(_bits(a).flatten().split(CHUNK), _bits(b).flatten().split(CHUNK), strict=True)
    return sum(int((x != y).sum()) for x, y in pairs)


@cache
def _copy_buffers(device: str) -> tuple[Tensor, Tensor]:
    source = torch.randint(1, 255, (COPY_NBYTES[device],), dtype=torch.uint8, device=device)
    return source, torch.empty_like(source)


def copy_of(nbytes: int, device: str) -> Callable[[], object]:
    """A device copy that reads and writes `nbytes` together."""
    half = nbytes // 2
    source, target = _copy_buffers(device)
    sizes = [min(len(source), half - at) for at in range(0, half, len(source))]

    def run() -> None:
        for size in sizes:
            target[:size].copy_(source[:size])

    return run


def failed(what: str, failures: list[str]) -> None:
    """Print the exception being handled and go on."""
    failures.append(what)
    print(f"FAILED: {what}", file=sys.stderr)
    traceback.print_exc()


def guarded(what: str, items: Iterator[Any], failures: list[str]) -> Iterator[Any]:
    """The items up to the first failure."""
    try:
        yield from items
    except Exception:
        failed(what, failures)
