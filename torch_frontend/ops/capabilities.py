"""The implementation that runs each op on a device, and the reasons against the others."""

import torch

from ...core_kernels.dispatch import Capability
from ...core_kernels.launch import fail
from . import OPS, cpu_gemm
from . import device as devices

__all__ = ["Capability", "capabilities"]


def capabilities(device: torch.device | str | None = None) -> dict[str, Capability]:
    """Return the implementation that runs each op on a device, under the current `force_implementation`.

    Args:
        device: a torch.device or its name; None is a GPU where there is one.

    Returns:
        A `Capability` by the name of the op: what runs it, and why other implementations do not.

    Raises:
        ValueError: a device that this machine does not have.

    Example:
        >>> capabilities("cpu")["quantize_row"].uses
        'cpp'
    """
    device = _existing(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    matmul = dict.fromkeys(cpu_gemm.TABLE, "torch.matmul")
    return {name: devices.capability(op, device, matmul.get(name, "")) for name, op in OPS.items()}


def _existing(device: torch.device | str) -> torch.device:
    try:
        named = torch.device(device)
        if named.type == "cuda":
            devices.compute_capability(named)
        else:  # torch.device takes the names of devices that this build or machine does not have
            torch.empty(0, device=named)
    except (AssertionError, ImportError, RuntimeError, TypeError):
        allowed = "allowed: a torch.device of this machine or its name"
        fail(ValueError, "capabilities", "device", repr(device), allowed)
    return named
