"""The implementation that runs each op on a platform, and the reasons against the others."""

from typing import Literal

import jax
from jax.export import DisabledSafetyCheck

from ...core_kernels.dispatch import IMPLEMENTATIONS, Capability
from ...core_kernels.launch import fail
from . import OPS, cpu_gemm, device
from .launch import CPP_TARGETS, CUDA_TARGETS
from .triton import TRITON_TARGET

__all__ = ["Capability", "capabilities", "export_checks"]


def capabilities(platform: Literal["cpu", "cuda"] | None = None) -> dict[str, Capability]:
    """Return the implementation that runs each op on a platform, under the current `force_implementation` and
    `lower_for`.

    Args:
        platform: "cpu" or "cuda"; None is JAX's default platform.

    Returns:
        A `Capability` by the name of the op: what runs it, and why other implementations do not.

    Raises:
        ValueError: another platform.

    Example:
        >>> capabilities("cpu")["quantize_row"].uses
        'cpp'
    """
    if platform is None:
        platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if platform not in ("cpu", "cuda"):
        fail(ValueError, "capabilities", "platform", repr(platform), "allowed: 'cpu' or 'cuda'")
    try:
        device.describe(platform)
    except NotImplementedError as error:
        return dict.fromkeys(OPS, Capability("", dict.fromkeys(IMPLEMENTATIONS, str(error))))
    matmul = dict.fromkeys(cpu_gemm.GEMMS, "jax matmul")
    return {name: device.capability(op, platform, matmul.get(name, "")) for name, op in OPS.items()}


def export_checks() -> list[DisabledSafetyCheck]:
    """The kernels, as `jax.export.export` takes custom calls whose stability it cannot know, for both platforms.

        exported = jax.export.export(jax.jit(f), disabled_checks=export_checks())(x)

    A program of bytes runs where mxep.jax_frontend is imported, with the kernels of the version that exported it.

    Returns:
        A list for `disabled_checks` of `jax.export.export`.

    Example:
        >>> any("mxep.quantize_row" in str(check) for check in export_checks())
        True
    """
    targets = {*CPP_TARGETS.values(), *CUDA_TARGETS.values(), TRITON_TARGET}
    return [DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]
