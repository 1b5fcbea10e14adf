"""What a CUDA program is lowered for: the architecture, and the implementation where several could run.

Both settings are parts of the key of JAX's caches: what was lowered under one is not taken for another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import jax

from .. import cpp_bindings
from ..core_kernels.fold.plan_both import PARTS
from ..core_kernels.launch import KernelOp, fail

Implementation = Literal["cpp", "cuda", "triton"]
Choice = Literal[Implementation, "parts"]

CAPABILITIES = {"sm_90": (9, 0), "sm_100": (10, 0)}
_arch = jax.make_user_context(None)
_implementation = jax.make_user_context(None)


@contextmanager
def lower_for(arch: str) -> Iterator[None]:
    """Within the block CUDA programs are lowered for "sm_90" or "sm_100", whatever this machine has:
    `with lower_for("sm_90"): jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))`.

    Raises ValueError for another architecture.
    """
    if not isinstance(arch, str) or arch not in CAPABILITIES:
        fail(ValueError, "lower_for", "arch", repr(arch), f"allowed: {', '.join(map(repr, CAPABILITIES))}")
    with _arch(arch):
        yield


@contextmanager
def force_implementation(implementation: Implementation | None) -> Iterator[None]:
    """Within the block lower every op to "cpp", "cuda" or "triton"; None restores the choice: C++ on a CPU, on a GPU
    CUDA C++ for the ops of its table and Triton for the others.

    An implementation that the platform cannot run raises NotImplementedError while lowering. The setting holds for
    what this thread traces and is part of the key of JAX's caches.
    """
    if implementation not in (*get_args(Implementation), None):
        allowed = "allowed: 'cpp', 'cuda', 'triton', None"
        fail(ValueError, "force_implementation", "implementation", repr(implementation), allowed)
    with _implementation(implementation):
        yield


def forced() -> Implementation | None:
    """What `force_implementation` says."""
    return _implementation.value


def lowered_for() -> tuple[int, int] | None:
    """The compute capability that `lower_for` says, None outside of it."""
    return CAPABILITIES[_arch.value] if _arch.value else None


def _capability() -> tuple[int, int]:
    if lowered := lowered_for():
        return lowered
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:
        allowed = "allowed: a CUDA device, or lowering inside lower_for('sm_90')"
        fail(NotImplementedError, "mxep", "device", "no CUDA device", allowed)
    major, minor = map(int, str(capability).split("."))
    return major, minor


def compute_capability() -> tuple[int, int]:
    """Of `lower_for`, or of the first CUDA device: (9, 0) on Hopper.

    Raises NotImplementedError without a device of sm_89 or newer.
    """
    major, minor = _capability()
    if (major, minor) < (8, 9):
        allowed = "allowed: sm_89 and newer; on a CPU the C++ kernels run: jax.device_put to jax.devices('cpu')[0]"
        fail(NotImplementedError, "mxep", "device", f"sm_{major}{minor}", allowed)
    return major, minor


def _arch_of(capability: tuple[int, int]) -> str:
    """ "sm_90" for Hopper, "sm_100" for Blackwell's data-center chips; others by their own numbers."""
    major, minor = capability
    return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(major, f"sm_{major}{minor}")


def arch() -> str:
    """What a program that is traced now is for: "cpu", "sm_90", "sm_100", or another GPU's "sm_89", "sm_120".

    That of `lower_for`; outside of it, of JAX's default backend.
    """
    on_gpu = lowered_for() is not None or jax.default_backend() == "gpu"
    return _arch_of(_capability()) if on_gpu else "cpu"


def choose_on_cpu(op: KernelOp, implementation: Implementation | None) -> Implementation:
    """C++; NotImplementedError where another implementation is forced."""
    if implementation not in ("cpp", None):
        allowed = "allowed: 'cpp'; jax-triton and CUDA run kernels on a GPU alone"
        fail(NotImplementedError, op.name, "platform", f"cpu with '{implementation}' forced", allowed)
    return "cpp"


def without_cuda(op: KernelOp) -> Choice:
    """What runs an op on a GPU where CUDA C++ does not."""
    return "parts" if op in PARTS else "triton"


def choose_on_cuda(op: KernelOp, implementation: Implementation | None) -> tuple[Choice, str]:
    """The implementation on CUDA and the architecture to plan for, "sm_90" or "sm_100".

    Raises NotImplementedError where the device or the forced implementation cannot run the op.
    """
    if implementation == "cpp":
        fail(NotImplementedError, op.name, "platform", "cuda with 'cpp' forced", "allowed: cpu")
    capability = compute_capability()
    # GPUs without tiles of their own take Hopper's.
    arch = _arch_of(capability) if _arch_of(capability) in CAPABILITIES else "sm_90"
    missing = cpp_bindings.why_not_cuda(op.name, capability)
    if implementation == "cuda" and missing:
        fail(NotImplementedError, op.name, "platform", "cuda with 'cuda' forced", missing)
    if implementation != "triton" and not missing:
        return "cuda", arch
    return without_cuda(op), arch
