"""From a launch description to tensors: the only file that starts a kernel.

KernelOp + tensors + options
   |-- check: dense, one device            (user errors, once)
   |-- plan:  shapes, dtypes, grid, tiles   (core_kernels)
   |-- torch.empty for every output
   '-- CPU: C++ table (grouped GEMM: _cpu_gemm.py)   |   CUDA: Triton on the current stream
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from .. import cpp_bindings
from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import ArrayType, KernelOp, Launch, fail
from . import _cpu_gemm

Implementation = Literal["cpp", "triton"]

# Process-wide rather than per thread or per context: autograd runs CUDA backward in threads of its own.
_forced: Implementation | None = None
_debug = False

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)


@contextmanager
def force_implementation(implementation: Implementation | None) -> Iterator[None]:
    """Within the block run every op with "cpp" or "triton"; None restores the choice by device.

    On a CPU "triton" needs Triton's interpreter (TRITON_INTERPRET=1 before triton is imported). An
    implementation that cannot run on the tensors given raises NotImplementedError; none is replaced
    silently. The setting is process-wide: it holds for backward threads too.
    """
    global _forced
    if implementation not in ("cpp", "triton", None):
        fail(
            ValueError, "force_implementation", "implementation", repr(implementation), "allowed: 'cpp', 'triton', None"
        )
    before, _forced = _forced, implementation
    try:
        yield
    finally:
        _forced = before


@contextmanager
def debug_checks() -> Iterator[None]:
    """Within the block check the values of group ends, counts and row maps on CUDA too, with a host sync each.

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


def _check_row_map(op: str, row_map: Tensor, rows: int) -> None:
    if row_map.numel() and not -1 <= int(row_map.min()) <= int(row_map.max()) < rows:
        got = f"rows {int(row_map.min())} to {int(row_map.max())}"
        fail(ValueError, op, "row_map", got, f"allowed: -1 (padding) or a row below {rows}")


def interpreted(op: KernelOp) -> bool:
    """Whether the op's Triton kernel was defined under Triton's interpreter."""
    return type(op.kernel).__name__ == "InterpretedFunction"


def cuda_arch(device: torch.device) -> str:
    """The architecture name that plans know: "sm_90" or "sm_100"; NotImplementedError below sm_89."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        fail(NotImplementedError, "mxep", "device", f"sm_{major}{minor}", "allowed: sm_89 and newer")
    return "sm_100" if major in (10, 11) else "sm_90"


def as_bytes(tensor: Tensor) -> Tensor:
    """View E4M3 or E8M0 tensors as the uint8 that crosses every boundary; others pass."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor


def require_tensor(op: str, argument: str, value: object) -> None:
    """Raise TypeError unless the value is a tensor."""
    if not isinstance(value, Tensor):
        fail(TypeError, op, argument, f"a {type(value).__name__}", "allowed: a torch.Tensor")


def array_type(tensor: Tensor) -> ArrayType:
    return ArrayType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def empty(array: ArrayType, device: torch.device) -> Tensor:
    return torch.empty(array.shape, dtype=getattr(torch, array.dtype), device=device)


def check_devices(op: KernelOp, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless all tensors are on the first one's device."""
    for name, tensor in zip(op.inputs, tensors, strict=True):
        if tensor.device != tensors[0].device:
            allowed = f"allowed: {tensors[0].device}, where {op.inputs[0]} is; move it with .to()"
            fail(ValueError, op.name, name, f"device {tensor.device}", allowed)


def check_contiguous(op: KernelOp, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless all tensors are dense and row-major."""
    for name, tensor in zip(op.inputs, tensors, strict=True):
        if not tensor.is_contiguous():
            got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            fail(ValueError, op.name, name, got, "allowed: contiguous tensors; call .contiguous()")


def call(op: KernelOp, *tensors: Tensor, **options: int | bool | str) -> tuple[Tensor, ...]:
    """Run one op on dense tensors of one device and return its outputs, freshly allocated.

    Raises ValueError, TypeError (see `KernelOp.plan`) and NotImplementedError where the device or the
    forced implementation cannot run it.
    """
    inputs = [as_bytes(t).detach() for t in tensors]
    check_devices(op, inputs)
    check_contiguous(op, inputs)
    device = inputs[0].device
    arch = choose_arch(op, device, _forced)
    launch = op.plan(*map(array_type, inputs), arch=arch, **options)
    if op.inputs[-1] == "group_ends" and checks_values(device):
        # Blocks that run along the tokens must not cross groups.
        tokens_dim, multiple = (1, BLOCK) if op.name == "grouped_wgrad_mx" else (0, 1)
        rows = int(options.get("num_rows", inputs[0].shape[tokens_dim]))
        check_ends(op.name, "group_ends", inputs[-1], rows, multiple, "pad the groups, see `row_map`")
    if "row_map" in op.inputs and arch != "cpu" and checks_values(device):
        _check_row_map(op.name, inputs[1], inputs[0].shape[0])
    outputs = tuple(empty(array, device) for array in launch.out)
    if arch == "cpu" and op.name in _cpu_gemm.TABLE:
        # An exact product does not become another one under the caller's autocast.
        with torch.autocast("cpu", enabled=False):
            _cpu_gemm.TABLE[op.name](*inputs, *outputs)
    elif arch == "cpu":
        cpp_bindings.run(op.name, inputs, list(outputs), [int(a) for a in launch.attrs])
    elif all(launch.grid):
        _launch_triton(op, launch, inputs, outputs)
    return outputs


def choose_arch(op: KernelOp, device: torch.device, forced: Implementation | None) -> str:
    """The architecture to plan for: "cpu" (C++, no tiles), "interpreter", "sm_90" or "sm_100".

    Raises NotImplementedError where the device or the forced implementation cannot run the op.
    """
    if device.type == "cpu":
        if forced != "triton":
            return "cpu"
        if not interpreted(op):
            fail(
                NotImplementedError, op.name, "device", "cpu with 'triton' forced",
                "allowed: under Triton's interpreter (set TRITON_INTERPRET=1 before importing triton)",
            )  # fmt: skip
        return "interpreter"
    if device.type != "cuda":
        fail(NotImplementedError, op.name, "device", device, "allowed: cpu and cuda tensors")
    if forced == "cpp":
        fail(NotImplementedError, op.name, "device", f"{device} with 'cpp' forced", "allowed: cpu tensors")
    if op.kernel is None:
        fail(NotImplementedError, op.name, "device", device, "allowed: cpu tensors; this op has no CUDA kernel")
    return cuda_arch(device)


def _launch_triton(op: KernelOp, launch: Launch, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    args = (*inputs, *launch.scalars.values(), *outputs)
    options = {**launch.meta, "num_warps": launch.num_warps, "num_stages": launch.num_stages}
    if inputs[0].is_cuda:
        # Triton launches on the current device's current stream, which need not be the tensors' device.
        with torch.cuda.device(inputs[0].device):
            op.kernel[launch.grid](*args, **options)
    else:
        op.kernel[launch.grid](*args, **options)
