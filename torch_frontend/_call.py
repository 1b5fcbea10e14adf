"""From an op to tensors: the checks around every call.

KernelOp + tensors + options
   |-- bind:  one device, dense, the plan, what starts it   (_launch.py; once per layouts, then cached)
   |-- check: on a GPU, addresses; on a CPU, the values of group ends
   |-- allocate: every output, laid out by bind
   '-- start: C++ on a CPU   |   CUDA C++ or Triton on the GPU's current stream   |   or other ops, composed
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue] -- no stub

from ..core_kernels import both_fold
from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import KernelOp, fail
from ._device import forced
from ._launch import FLOAT8, Output, bind, check_aligned

# Process-wide rather than per thread or per context: autograd runs CUDA backward in threads of its own.
_debug = False

TOKENS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("grouped_wgrad_mx", "grouped_wgrad_fold", "fold_groups"), (1, BLOCK)),
    "grouped_wgrad_bf16_t": (1, 1),
    "quantize_both_fold": (0, BLOCK),
}
"""Where ops with group ends have their tokens: along which dim of the first operand, and what ends are multiples of,
since scales do not cross groups. Others: (0, 1)."""


@contextmanager
def debug_checks() -> Iterator[None]:
    """Within the block check the values of group ends, counts, row maps and slots on CUDA too, with a host sync each.

    On a CPU they are always checked. The setting is process-wide.
    """
    global _debug
    before, _debug = _debug, True
    try:
        yield
    finally:
        _debug = before


def checks_values(device: torch.device) -> bool:
    """Whether data-dependent contracts are checked for tensors of this device."""
    return _debug or device.type == "cpu"


def check_ends(op: str, argument: str, group_ends: Tensor, rows: int, multiple: int = 1, remedy: str = "") -> None:
    """Raise ValueError unless the ends are non-decreasing multiples of `multiple` in 0..rows. Reads the values."""
    ends = group_ends.tolist()
    if any(a > b for a, b in zip([0, *ends], [*ends, rows], strict=True)):
        fail(
            ValueError,
            op,
            argument,
            ends,
            f"allowed: non-decreasing ends from 0 up to {rows}, the rows of the first operand",
        )
    if any(end % multiple for end in ends):
        fail(ValueError, op, argument, ends, f"allowed: multiples of {multiple}; {remedy}")


def _check_maps(op: KernelOp, inputs: Sequence[Tensor]) -> None:
    """Raise ValueError unless the op's maps lead to -1 or to what is there. Reads the values."""
    given = dict(zip(op.inputs, inputs, strict=True))
    limits = {}
    if "row_map" in given:
        limits["row_map"] = inputs[0].shape[0]
    if "slots" in given:
        limits["slots"] = given["rows"].shape[0]
    if "order" in given:
        limits["order"] = given["slots"].numel()
    for name, limit in limits.items():
        low, high = (int(x) for x in given[name].aminmax()) if given[name].numel() else (0, -1)
        if low < -1 or high >= limit:
            fail(ValueError, op.name, name, f"{low} to {high}", f"allowed: -1 (padding) or an index below {limit}")


def as_bytes(tensor: Tensor) -> Tensor:
    """View E4M3 or E8M0 tensors as the uint8 that crosses every boundary; others pass."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def require_tensor(op: str, argument: str, value: object) -> None:
    """Raise TypeError unless the value is a tensor."""
    if not isinstance(value, Tensor):
        fail(TypeError, op, argument, f"a {type(value).__name__}", "allowed: a torch.Tensor")


def allocate(outputs: Sequence[Output], device: torch.device) -> list[Tensor]:
    """Fresh outputs; on a GPU the current one, by the call that torch.compile's programs make: no dispatcher."""
    if device.type == "cuda":
        return [_empty_strided_cuda(*output) for output in outputs]
    return [torch.empty(output.shape, dtype=output.dtype, device=device) for output in outputs]


def call(op: KernelOp, *tensors: Tensor, **options: int | bool | str) -> tuple[Tensor, ...]:
    """Run one op on dense tensors of one device and return its outputs, freshly allocated; what its kernel needed
    besides them is let go.

    Raises ValueError, TypeError (see `bind` and `KernelOp.plan`) and NotImplementedError where the device or the
    forced implementation cannot run it.
    """
    return run(op, tensors, tuple(options.items()))


def run(op: KernelOp, tensors: Sequence[Tensor], options: tuple[tuple[str, Any], ...]) -> tuple[Tensor, ...]:
    """`call` with options in the order of the op's plan: what an op of `torch.ops.mxep` is made of."""
    inputs = [t.detach() if t.requires_grad else t for t in tensors]
    layouts = tuple([(t.shape, t.dtype, t.device, t.stride()) for t in inputs])
    arch, device, fp8, out, start = bind(op, layouts, forced(), options)
    if device.type == "cuda":
        if device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):  # where outputs are allocated and Triton launches
                return run(op, inputs, options)
        check_aligned(op, inputs)
    if fp8:
        inputs = [as_bytes(t) for t in inputs]
    if op.inputs[-1] == "group_ends" and checks_values(device):
        dim, multiple = TOKENS.get(op.name, (0, 1))
        rows = int(dict(options).get("num_rows", inputs[0].shape[dim]))
        check_ends(op.name, "group_ends", inputs[-1], rows, multiple, "pad the groups, see `row_map`")
    if arch != "cpu" and checks_values(device):
        _check_maps(op, inputs)
    if start is None:
        return COMPOSED[op](*inputs, **dict(options))
    outputs = allocate(out, device)
    start(inputs, outputs)
    return tuple(outputs[: len(op.outputs)])


COMPOSED = {both_fold.quantize_both_fold: partial(both_fold.composed, call)}
"""The ops that `both_fold.PARTS` names, of their parts."""
