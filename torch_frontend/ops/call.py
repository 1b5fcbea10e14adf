"""A call of an op on tensors.

KernelOp + tensors + options
   |-- prepare:  one device, dense, aligned; signature and launch      (launch.py; once per layouts and options)
   |-- check:    on a CPU, the values of group ends
   |-- allocate: the outputs and the scratch memory
   '-- run:      C++ on a CPU   |   CUDA C++ or Triton on the current stream of the GPU   |   other ops, composed
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core_kernels.launch import KernelOp, fail, require_ends_of
from ...core_kernels.registry import OPS
from . import settings
from .launch import Outputs, known_calls, plain, prepare
from .private import current_gpu, empty_cuda, layouts

forced, debug = settings.forced.get, settings.debug.get

FLOATS = (torch.bfloat16, torch.float32)
"""The dtypes that are quantized and that products are rounded to."""


def debug_checks() -> AbstractContextManager[None]:
    """Within the block check the values of group ends, counts, row maps and slots on CUDA too, with a host sync each.

    On a CPU they are always checked. The setting holds for this thread or asyncio task; a backward runs under the
    setting of its forward.

    Returns:
        A context manager.

    Example:
        >>> with debug_checks():
        ...     out = grouped_mm(torch.ones(3, 32), torch.ones(1, 32, 32), torch.tensor([3]))
    """
    return settings.debug.within(True)


def checks_values(device: torch.device) -> bool:
    """Whether data-dependent contracts are checked for tensors of this device."""
    return settings.debug.get() or device.type == "cpu"


def _check_values(op: KernelOp, inputs: Sequence[Tensor], tokens: tuple[int, int] | None, arch: str) -> None:
    """Raise ValueError unless group ends end groups of the tokens and maps lead to rows that exist."""
    if tokens is not None:
        require_ends_of(op, inputs[op.inputs.index("group_ends")].tolist(), tokens)
    if arch != "cpu":  # the C++ kernels check maps themselves
        _check_maps(op, inputs)


def _check_maps(op: KernelOp, inputs: Sequence[Tensor]) -> None:
    """Raise ValueError unless the entries of the op's maps are -1 or rows that exist. Reads the values."""
    given = dict(zip(op.inputs, inputs, strict=True))
    limits = {}
    if "row_map" in given:
        limits["row_map"] = inputs[0].shape[0]
    if "slots" in given:
        limits["slots"] = given["rows"].shape[0]
    if "order" in given:
        limits["order"] = given.get("slots", given["order"]).numel()  # of `slot_map`, a permutation
    for name, limit in limits.items():
        low, high = (int(x) for x in given[name].aminmax()) if given[name].numel() else (0, -1)
        if low < -1 or high >= limit:
            fail(ValueError, op.name, name, f"{low} to {high}", f"allowed: -1 (padding) or an index below {limit}")


def require_tensor(op: str, argument: str, value: object) -> None:
    """Raise TypeError unless the value is a tensor with strides."""
    if not isinstance(value, Tensor):
        fail(TypeError, op, argument, f"a {type(value).__name__}", "allowed: a torch.Tensor")
    if isinstance(value, DTensor):
        fail(TypeError, op, argument, "a DTensor", "allowed: this rank's tensor, .to_local()")
    if value.layout != torch.strided or value.is_nested:
        got = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        fail(TypeError, op, argument, got, "allowed: dense tensors; call .to_dense() or .to_padded_tensor(0)")


def allocate(outputs: Outputs, index: int | None) -> tuple[Tensor, ...]:
    """Fresh outputs on a CPU (None) or on the current GPU."""
    if index is not None:
        return tuple(map(empty_cuda, *outputs))
    return tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, _, dtype in zip(*outputs, strict=True))


def _check_given(op: KernelOp, given: Sequence[Tensor], outputs: Outputs) -> None:
    """Raise ValueError unless the tensors are as the op's first outputs would be allocated."""
    for name, tensor, shape, dtype in zip(op.outputs, given, outputs.shapes, outputs.dtypes, strict=False):
        aligned = not tensor.is_cuda or tensor.data_ptr() % 16 == 0
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or not aligned:
            got = f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, data_ptr() {tensor.data_ptr():#x}"
            fail(ValueError, op.name, name, got, f"allowed: contiguous {dtype} {shape}, at multiples of 16 on a GPU")


def call(op: KernelOp, *tensors: Tensor, **options: int | bool | float | str) -> tuple[Tensor, ...]:
    """Run one op on dense tensors of one device and return its outputs, freshly allocated.

    Raises ValueError, TypeError (see `prepare` and `KernelOp.check`) and NotImplementedError where the device or the
    forced implementation cannot run it.
    """
    return call_out((), op, *tensors, **options)


def call_out(
    given: tuple[Tensor, ...], op: KernelOp, *tensors: Tensor, **options: int | bool | float | str
) -> tuple[Tensor, ...]:
    """`call` whose first outputs are written to `given`, which no input overlaps."""
    outputs = RUN[op.name](*with_ends(op, tensors), *_by_position(op, options), given=given)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


# Read once: `KernelOp.options` inspects a signature, which takes longer than the rest of a call.
_DEFAULTS = {name: {option: p.default for option, p in op.options.items()} for name, op in OPS.items()}


def _by_position(op: KernelOp, options: dict[str, Any]) -> tuple[Any, ...]:
    """The values of the op's options, up to the last of the given ones."""
    values: list[Any] = []
    for name, default in _DEFAULTS[op.name].items():
        if not options:
            break
        values.append(options.pop(name, default))
    if options:
        raise TypeError(f"{op.name}: has no option {', '.join(options)}")
    return tuple(values)


def with_ends(op: KernelOp, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op by position, with an empty tensor for optional `group_ends` that are left out or None."""
    last = len(op.inputs) - 1
    if not op.optional_ends or (len(args) > last and args[last] is not None):
        return args
    return *args[:last], args[0].new_empty(0, dtype=torch.int32), *args[last + 1 :]


def _runner(op: KernelOp) -> Callable[..., Any]:
    """`call_out` with arguments by position: the tensors, then the values of as many options as there are. The body of
    an op of `torch.ops.mxep`, which returns a single output by itself."""
    count, single, optional = len(op.inputs), len(op.outputs) == 1, op.optional_ends

    def run(*args: Any, given: tuple[Tensor, ...] = ()) -> Any:
        if optional:
            args = with_ends(op, args)
        tensors = args[:count]
        key = op, layouts(tensors), forced(), args[count:]
        prepared = known_calls.recent.get(key)
        if prepared is None:
            prepared = prepare(key, tensors)
        arch, index, options, tokens, out, runner, scratch = prepared
        if index is not None and index != current_gpu():
            with torch.cuda.device(index):  # outputs are allocated and Triton launches there
                return run(*args, given=given)
        if index is None or debug():
            _check_values(op, tensors, tokens, arch)
        if runner is None:
            outputs = _composed(op, tensors, options, given)
        else:
            if given:
                _check_given(op, given, out)
                outputs = *given, *allocate(out.after(len(given)), index)
            else:
                outputs = allocate(out, index)
            runner(tensors, outputs)
            if scratch:
                outputs = outputs[:-scratch]
        return outputs[0] if single else outputs

    return run


def _composed(
    op: KernelOp, tensors: tuple[Tensor, ...], options: dict[str, Any], given: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    assert op.compose is not None
    found = op.compose(call, *plain(tensors), **options)
    for buffer, result in zip(given, found, strict=False):
        buffer.copy_(result)
    return *given, *found[len(given) :]


RUN: dict[str, Callable[..., Any]] = {name: _runner(op) for name, op in OPS.items()}
