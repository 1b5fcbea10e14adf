"""From an op to tensors: the checks around every call.

KernelOp + tensors + options
   |-- bind:  one device, dense, aligned, the plan, what starts it   (_launch.py; once per layouts, then known)
   |-- check: on a CPU, the values of group ends
   |-- allocate: every output, laid out by bind
   '-- start: C++ on a CPU   |   CUDA C++ or Triton on the GPU's current stream   |   or other ops, composed
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core_kernels.fold import plan_both as both_fold
from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import KernelOp, fail
from . import _settings
from ._launch import Outputs, bind, plain
from ._torch_private import current_gpu, empty_cuda

FLOATS = (torch.bfloat16, torch.float32)
"""What is quantized, and what the products give."""

TOKENS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("grouped_wgrad_mx", "grouped_wgrad_fold", "fold_groups"), (1, BLOCK)),
    "grouped_wgrad_bf16_t": (1, 1),
    "quantize_both_fold": (0, BLOCK),
}
"""Where ops with group ends have their tokens: along which dim of the first operand, and what ends are multiples of,
since scales do not cross groups. Others: (0, 1)."""


def debug_checks() -> AbstractContextManager[None]:
    """Within the block check the values of group ends, counts, row maps and slots on CUDA too, with a host sync each.

    On a CPU they are always checked. The setting is this thread's, or this asyncio task's; a backward runs in that of
    its forward.
    """
    return _settings.debug.within(True)


def checks_values(device: torch.device) -> bool:
    """Whether data-dependent contracts are checked for tensors of this device."""
    return _settings.debug.value or device.type == "cpu"


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


def _check_values(op: KernelOp, inputs: Sequence[Tensor], options: dict[str, Any], arch: str) -> None:
    """Raise ValueError unless the op's ends end groups of its tokens and its maps lead to what is there."""
    if op.inputs[-1] == "group_ends":
        dim, multiple = TOKENS.get(op.name, (0, 1))
        rows = int(options.get("num_rows", inputs[0].shape[dim]))
        check_ends(op.name, "group_ends", inputs[-1], rows, multiple, "pad the groups, see `row_map`")
    if arch != "cpu":  # the C++ kernels look at maps themselves
        _check_maps(op, inputs)


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


def require_tensor(op: str, argument: str, value: object) -> None:
    """Raise TypeError unless the value is a tensor with strides."""
    if not isinstance(value, Tensor):
        fail(TypeError, op, argument, f"a {type(value).__name__}", "allowed: a torch.Tensor")
    if value.layout != torch.strided or value.is_nested:
        got = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        fail(TypeError, op, argument, got, "allowed: dense tensors; call .to_dense() or .to_padded_tensor(0)")


def allocate(outputs: Outputs, index: int | None) -> tuple[Tensor, ...]:
    """Fresh outputs on a CPU (None) or on the current GPU."""
    if index is not None:
        return tuple(map(empty_cuda, *outputs))
    return tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, _, dtype in zip(*outputs, strict=True))


def call(op: KernelOp, *tensors: Tensor, **options: int | bool | str) -> tuple[Tensor, ...]:
    """Run one op on dense tensors of one device and return its outputs, freshly allocated; what its kernel needed
    besides them is let go.

    Raises ValueError, TypeError (see `bind` and `KernelOp.plan`) and NotImplementedError where the device or the
    forced implementation cannot run it.
    """
    return run(op, tensors, tuple(options), tuple(options.values()))


def run(
    op: KernelOp, tensors: tuple[Tensor, ...], names: tuple[str, ...], values: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """`call` with `names[i]=values[i]` for as many values as there are: what an op of `torch.ops.mxep` is made of."""
    arch, index, options, out, start = bind(op, tensors, _settings.forced.value, names, values)
    if index is not None and index != current_gpu():
        with torch.cuda.device(index):  # where outputs are allocated and Triton launches
            return run(op, tensors, names, values)
    if index is None or _settings.debug.value:
        _check_values(op, tensors, options, arch)
    if start is None:
        return COMPOSED[op](*plain(tensors), **options)
    outputs = allocate(out, index)
    start(tensors, outputs)
    return outputs[: len(op.outputs)]


COMPOSED = {both_fold.quantize_both_fold: partial(both_fold.composed, call)}
"""The ops that `both_fold.PARTS` names, of their parts."""
