"""Which implementation runs each op on a device, and why the others do not."""

from typing import NamedTuple, get_args

import torch

from ..core_kernels.launch import fail
from . import _cpu_gemm, _device
from .ops import OPS


class Capability(NamedTuple):
    """uses: what runs, "" if nothing can. absent: for each implementation that cannot run, why."""

    uses: str
    absent: dict[str, str]


def capabilities(device: torch.device | str | None = None) -> dict[str, Capability]:
    """What every op runs on `device`, by the name of the op; None is a GPU where there is one.
    `force_implementation` is respected.

    >>> capabilities("cpu")["quantize_row"].uses
    'cpp'
    """
    device = _existing(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    return {name: Capability(_uses(name, device), _absent(name, device)) for name in OPS}


def _existing(device: torch.device | str) -> torch.device:
    try:
        named = torch.device(device)
        if named.type == "cuda":
            _device.compute_capability(named)
    except NotImplementedError:  # of an old GPU each op says so itself
        return torch.device(device)
    except (AssertionError, RuntimeError, TypeError):
        allowed = "allowed: a torch.device of this machine or its name"
        fail(ValueError, "capabilities", "device", repr(device), allowed)
    return named


def _uses(name: str, device: torch.device) -> str:
    try:
        implementation, arch = _device.choose(OPS[name], device, _device.forced())
    except NotImplementedError:
        return ""
    if implementation == "parts":
        return ", ".join(part.name for part in _device.PARTS[OPS[name]])
    if implementation == "cpp":
        return "torch.matmul on operands dequantized in C++" if name in _cpu_gemm.TABLE else "cpp"
    if device.type == "cpu":
        return f"{implementation}, {arch}"
    sm = "sm_{}{}".format(*_device.compute_capability(device))
    return f"{implementation}, {sm}" if sm == arch else f"{implementation}, {sm} with the tiles of {arch}"


def _absent(name: str, device: torch.device) -> dict[str, str]:
    reasons = {}
    for implementation in get_args(_device.Implementation):
        try:
            _device.choose(OPS[name], device, implementation)
        except NotImplementedError as error:
            reasons[implementation] = str(error)
    if name in _cpu_gemm.TABLE:
        reasons["cpp"] = f"{name}: grouped products have no C++ kernel; on a CPU torch.matmul multiplies"
    return reasons
