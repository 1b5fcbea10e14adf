"""Which implementation runs each op on a device, and why the others do not."""

from typing import NamedTuple

import torch

from . import _call, _cpu_gemm
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
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return {name: Capability(_uses(name, device), _absent(name, device)) for name in OPS}


def _uses(name: str, device: torch.device) -> str:
    try:
        arch = _call.choose_arch(OPS[name], device, _call._forced)
    except NotImplementedError:
        return ""
    if arch != "cpu":
        return f"triton, {arch}"
    return "torch.matmul on operands dequantized in C++" if name in _cpu_gemm.TABLE else "cpp"


def _absent(name: str, device: torch.device) -> dict[str, str]:
    reasons = {}
    for implementation in ("cpp", "triton"):
        try:
            _call.choose_arch(OPS[name], device, implementation)
        except NotImplementedError as error:
            reasons[implementation] = str(error)
    if name in _cpu_gemm.TABLE:
        reasons["cpp"] = f"{name}: grouped products have no C++ kernel; on a CPU torch.matmul multiplies"
    return reasons
