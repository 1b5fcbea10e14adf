"""The device of a program as dispatch.py describes it, and the implementation that each op is lowered to.

Both settings are parts of the key of JAX's caches: a program lowered under one setting is not reused under another.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from ... import cpp_bindings
from ...core_kernels import dispatch
from ...core_kernels.dispatch import CAPABILITIES, Capability, Choice, Device, Implementation
from ...core_kernels.launch import KernelOp, fail

_arch = jax.make_user_context(None)
_implementation = jax.make_user_context(None)


@contextmanager
def lower_for(arch: str) -> Iterator[None]:
    """Within the block lower CUDA programs for an architecture, whatever GPU this machine has.

    Args:
        arch: "sm_90" or another architecture of `dispatch.GPUS`.

    Returns:
        A context manager.

    Raises:
        ValueError: another architecture.

    Example:
        >>> def lower(f, x):  # the program that a Hopper GPU runs
        ...     with lower_for("sm_90"):
        ...         return jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))
    """
    if not isinstance(arch, str) or arch not in CAPABILITIES:
        fail(ValueError, "lower_for", "arch", repr(arch), f"allowed: {', '.join(map(repr, CAPABILITIES))}")
    with _arch(arch):
        yield


@contextmanager
def force_implementation(implementation: Implementation | None) -> Iterator[None]:
    """Within the block lower every op to one implementation.

    The setting holds for the programs that this thread traces.

    Args:
        implementation: "cpp", "cuda" or "triton". None restores the choice: C++ on a CPU; on a GPU CUDA C++ for the ops
            of its table and Triton for the others.

    Returns:
        A context manager.

    Raises:
        ValueError: another name.
        NotImplementedError: lowering, where the platform cannot run the forced implementation.

    Example:
        >>> with force_implementation("cpp"):
        ...     q, sf = ops.quantize_row(jnp.ones((1, 32)))
    """
    dispatch.require_known("force_implementation", implementation)
    with _implementation(implementation):
        yield


def forced() -> Implementation | None:
    """The implementation of the innermost `force_implementation`."""
    return _implementation.value


def lowered_for() -> tuple[int, int] | None:
    """The compute capability of `lower_for`; None outside of it."""
    return CAPABILITIES[_arch.value] if _arch.value else None


def compute_capability() -> tuple[int, int]:
    """(9, 0) on Hopper: of `lower_for`, or of the first CUDA device.

    Raises NotImplementedError without either.
    """
    if lowered := lowered_for():
        return lowered
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:
        allowed = "allowed: a CUDA device, or lowering inside lower_for('sm_90')"
        fail(NotImplementedError, "mxep", "device", "no CUDA device", allowed)
    major, minor = map(int, str(capability).split("."))
    return major, minor


def arch() -> str:
    """The architecture that a program is traced for: "cpu", "sm_90".

    Inside `lower_for` its architecture; outside, the architecture of JAX's default backend.
    """
    on_gpu = lowered_for() is not None or jax.default_backend() == "gpu"
    return dispatch.arch_name(compute_capability()) if on_gpu else "cpu"


def describe(platform: str) -> Device:
    """The device of a platform, "cpu" or "cuda", as `dispatch.choose` takes it."""
    return Device(platform, platform, compute_capability() if platform == "cuda" else None)


def choose(op: KernelOp, platform: str, forced: Implementation | None, no_cuda: str = "") -> Choice:
    """The implementation that the op is lowered to, and the architecture to plan for.

    no_cuda: the reason why CUDA C++ does not take the sizes of a planned call.

    Raises NotImplementedError where the device or the forced implementation cannot run the op.
    """
    found = describe(platform)
    if forced is None:
        cpp_bindings.warn_without_cuda(found.capability)
    return dispatch.choose(op, found, forced, no_cuda or _no_cuda(op, found), _no_triton(found))


def capability(op: KernelOp, platform: str, matmul: str) -> Capability:
    """What runs the op on the platform; `matmul` as for `dispatch.capability`."""
    found = describe(platform)
    return dispatch.capability(op, found, forced(), _no_cuda(op, found), _no_triton(found), matmul)


def _no_cuda(op: KernelOp, device: Device) -> str:
    return cpp_bindings.why_not_cuda(op.name, device.capability) if device.capability else ""


def _no_triton(device: Device) -> str:
    if device.platform == "cpu":
        return "allowed: 'cpp'; jax-triton compiles for GPUs alone"
    if importlib.util.find_spec("jax_triton") is None:
        return "allowed: 'cuda'; jax-triton is missing: pip install 'mxep[jax-cuda]'"
    return ""
