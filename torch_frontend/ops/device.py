"""The device of a tensor as dispatch.py describes it, and the implementation that runs an op there."""

from contextlib import AbstractContextManager
from functools import cache

import torch

from ... import cpp_bindings
from ...core_kernels import dispatch
from ...core_kernels.dispatch import Capability, Choice, Device, Implementation
from ...core_kernels.launch import KernelOp
from . import settings
from .private import no_cuda_launch


def force_implementation(implementation: Implementation | None) -> AbstractContextManager[None]:
    """Within the block run every op with one implementation.

    On a CPU "triton" needs the interpreter of Triton (TRITON_INTERPRET=1 before triton is imported). The setting holds
    for this thread or asyncio task; a backward runs under the setting of its forward.

    Args:
        implementation: "cpp", "cuda" or "triton". None restores the choice: C++ on a CPU; on a GPU CUDA C++ for the ops
            of its table and Triton for the others.

    Returns:
        A context manager.

    Raises:
        ValueError: another name.
        NotImplementedError: an op within the block, where the forced implementation cannot run.

    Example:
        >>> with force_implementation("cpp"):
        ...     q, sf = ops.quantize_row(torch.ones(1, 32))
    """
    dispatch.require_known("force_implementation", implementation)
    return settings.forced.within(implementation)


def forced() -> Implementation | None:
    """The implementation of the innermost `force_implementation`."""
    return settings.forced.get()


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) on Hopper."""
    return torch.cuda.get_device_capability(device)


def describe(device: torch.device) -> Device:
    """The device as `dispatch.choose` takes it."""
    capability = compute_capability(device) if device.type == "cuda" else None
    return Device(str(device), device.type, capability)


def arch_of(device: torch.device) -> str:
    """ "cpu", or the architecture of the GPU: "sm_90" on Hopper."""
    return dispatch.arch_name(compute_capability(device)) if device.type == "cuda" else "cpu"


def choose(op: KernelOp, device: torch.device, forced: Implementation | None, no_cuda: str = "") -> Choice:
    """The implementation that runs the op, and the architecture to plan for.

    no_cuda: the reason why CUDA C++ does not take the sizes of a planned call.

    Raises NotImplementedError where the device or the forced implementation cannot run the op.
    """
    found = describe(device)
    if forced is None:
        cpp_bindings.warn_without_cuda(found.capability)
    no_triton = _no_triton(op, found) if forced == "triton" else ""  # without need, triton is not imported
    return dispatch.choose(op, found, forced, no_cuda or _no_cuda(op, found), no_triton)


def capability(op: KernelOp, device: torch.device, matmul: str) -> Capability:
    """What runs the op on the device; `matmul` as for `dispatch.capability`."""
    found = describe(device)
    return dispatch.capability(op, found, forced(), _no_cuda(op, found), _no_triton(op, found), matmul)


def _no_cuda(op: KernelOp, device: Device) -> str:
    return (cpp_bindings.why_not_cuda(op.name, device.capability) or no_cuda_launch) if device.capability else ""


def _no_triton(op: KernelOp, device: Device) -> str:
    if device.platform != "cpu":
        return ""
    try:
        kernels = [part.triton_kernel() for part in op.parts or (op,)]
    except ModuleNotFoundError:
        return "allowed: 'cpp'; triton is missing: pip install triton"
    if all(type(kernel).__name__ == "InterpretedFunction" for kernel in kernels):
        return ""
    return "allowed: 'cpp'; 'triton' under its interpreter (set TRITON_INTERPRET=1 before importing triton)"
