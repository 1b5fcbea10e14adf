"""The implementation that runs each op on a platform, and the reasons against the others."""

from typing import Literal

import jax

from ..core_kernels.dispatch import IMPLEMENTATIONS, Capability
from ..core_kernels.launch import fail
from . import _cpu_gemm, _device
from .ops import OPS

__all__ = ["Capability", "capabilities"]


def capabilities(platform: Literal["cpu", "cuda"] | None = None) -> dict[str, Capability]:
    """The implementation that runs each op on `platform`, by the name of the op, under the current
    `force_implementation` and `lower_for`. None is JAX's default platform.

    >>> capabilities("cpu")["quantize_row"].uses
    'cpp'

    Raises ValueError for another platform.
    """
    if platform is None:
        platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if platform not in ("cpu", "cuda"):
        fail(ValueError, "capabilities", "platform", repr(platform), "allowed: 'cpu' or 'cuda'")
    try:
        _device.describe(platform)
    except NotImplementedError as error:
        return dict.fromkeys(OPS, Capability("", dict.fromkeys(IMPLEMENTATIONS, str(error))))
    matmul = dict.fromkeys(_cpu_gemm.GEMMS, "jax matmul")
    return {name: _device.capability(op, platform, matmul.get(name, "")) for name, op in OPS.items()}
