"""Which implementation runs an op on a device.

"cpp"     every op of a CPU
"cuda"    CUDA C++, for the ops of its table on the GPUs that the build has machine code for
"triton"  every other op of a GPU; on a CPU under Triton's interpreter, if forced

An op of `PARTS` has no Triton kernel: in its place others run, each as it would alone ("parts").
"""

from contextlib import AbstractContextManager
from functools import cache
from typing import Literal, get_args

import torch

from .. import cpp_bindings
from ..core_kernels.fold.plan_both import PARTS
from ..core_kernels.launch import KernelOp, fail
from . import _settings
from ._torch_private import no_cuda_launch

Implementation = Literal["cpp", "cuda", "triton"]
Choice = Literal[Implementation, "parts"]


def force_implementation(implementation: Implementation | None) -> AbstractContextManager[None]:
    """Within the block run every op with "cpp", "cuda" or "triton"; None restores the choice: C++ on a CPU, on a GPU
    CUDA C++ for the ops of its table and Triton for the others.

    On a CPU "triton" needs Triton's interpreter (TRITON_INTERPRET=1 before triton is imported). An
    implementation that cannot run on the tensors given raises NotImplementedError; none is replaced
    silently. The setting is this thread's, or this asyncio task's; a backward runs in that of its forward.
    """
    if implementation not in (*get_args(Implementation), None):
        allowed = "allowed: 'cpp', 'cuda', 'triton', None"
        fail(ValueError, "force_implementation", "implementation", repr(implementation), allowed)
    return _settings.forced.within(implementation)


def forced() -> Implementation | None:
    """What `force_implementation` says."""
    return _settings.forced.value


def interpreted(op: KernelOp) -> bool:
    """Whether the op's Triton kernel was defined under Triton's interpreter."""
    return type(op.kernel).__name__ == "InterpretedFunction"


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) on Hopper; NotImplementedError below 8.9, which has no E4M3 conversion."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        allowed = "allowed: sm_89 and newer; on a CPU the C++ kernels run: move the tensors with .cpu()"
        fail(NotImplementedError, "mxep", "device", f"sm_{major}{minor}", allowed)
    return major, minor


def arch_of(device: torch.device) -> str:
    """ "cpu", or the GPU's own architecture: "sm_90" on Hopper."""
    if device.type != "cuda":
        return "cpu"
    major, minor = compute_capability(device)
    return f"sm_{major}{minor}"


def without_cuda(op: KernelOp) -> Choice:
    """What runs an op on a GPU where CUDA C++ does not."""
    return "parts" if op in PARTS else "triton"


def choose(op: KernelOp, device: torch.device, forced: Implementation | None) -> tuple[Choice, str]:
    """The implementation, and the architecture to plan for: "cpu", "interpreter", "sm_90" or "sm_100".

    Raises NotImplementedError where the device or the forced implementation cannot run the op.
    """
    if device.type == "cpu":
        return _choose_on_cpu(op, forced)
    if device.type != "cuda":
        fail(NotImplementedError, op.name, "device", device, "allowed: cpu and cuda tensors")
    if forced == "cpp":
        fail(NotImplementedError, op.name, "device", f"{device} with 'cpp' forced", "allowed: cpu tensors")
    capability = compute_capability(device)
    # Blackwell's data-center chips have tiles of their own; all others take Hopper's.
    arch = "sm_100" if capability[0] in (10, 11) else "sm_90"
    missing = cpp_bindings.why_not_cuda(op.name, capability) or no_cuda_launch
    if forced == "cuda" and missing:
        fail(NotImplementedError, op.name, "device", f"{device} with 'cuda' forced", missing)
    if forced != "triton" and not missing:
        return "cuda", arch
    return without_cuda(op), arch


def _choose_on_cpu(op: KernelOp, forced: Implementation | None) -> tuple[Choice, str]:
    if forced == "cuda":
        fail(NotImplementedError, op.name, "device", "cpu with 'cuda' forced", "allowed: cuda tensors")
    if forced != "triton":
        return "cpp", "cpu"
    if not all(interpreted(part) for part in PARTS.get(op, (op,))):
        fail(
            NotImplementedError, op.name, "device", "cpu with 'triton' forced",
            "allowed: under Triton's interpreter (set TRITON_INTERPRET=1 before importing triton)",
        )  # fmt: skip
    return "parts" if op in PARTS else "triton", "interpreter"
