"""Which implementation runs each op on a platform, and why the others do not."""

import importlib.util
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax

from ..core_kernels.launch import KernelOp, fail
from . import _cpu_gemm, _device
from ._call import CPP_TARGETS
from .ops import OPS


class Capability(NamedTuple):
    """uses: what runs, "" if nothing can. absent: for each implementation that cannot run, why."""

    uses: str
    absent: dict[str, str]


def capabilities(platform: Literal["cpu", "cuda"] | None = None) -> dict[str, Capability]:
    """What every op runs on `platform`, by the name of the op; None is JAX's default one.

    >>> capabilities("cpu")["quantize_row"].uses
    'cpp'

    Raises ValueError for another platform.
    """
    if platform is None:
        platform = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if platform not in ("cpu", "cuda"):
        fail(ValueError, "capabilities", "platform", repr(platform), "allowed: 'cpu' or 'cuda'")
    return {name: _on_cpu(op) if platform == "cpu" else _on_cuda(op) for name, op in OPS.items()}


def _on_cpu(op: KernelOp) -> Capability:
    absent = _absent(lambda implementation: _device.choose_on_cpu(op, implementation))
    if op.name not in CPP_TARGETS:
        absent["cpp"] = f"{op.name}: grouped products have no C++ kernel; on a CPU jax multiplies"
    if _device.forced() in absent and (_device.forced() != "cpp" or op.name not in _cpu_gemm.GEMMS):
        return Capability("", absent)
    return Capability("cpp" if op.name in CPP_TARGETS else "jax matmul on operands dequantized in C++", absent)


def _on_cuda(op: KernelOp) -> Capability:
    absent = _absent(lambda implementation: _device.choose_on_cuda(op, implementation))
    if importlib.util.find_spec("jax_triton") is None:
        absent.setdefault("triton", f"{op.name}: jax-triton is missing: pip install 'mxep[jax-cuda]'")
    try:
        implementation, arch = _device.choose_on_cuda(op, _device.forced())
    except NotImplementedError:
        return Capability("", absent)
    if implementation == "parts":
        return Capability(", ".join(part.name for part in _device.PARTS[op]), absent)
    if implementation in absent:
        return Capability("", absent)
    sm = "sm_{}{}".format(*_device.compute_capability())
    return Capability(
        f"{implementation}, {sm}" if sm == arch else f"{implementation}, {sm} with the tiles of {arch}", absent
    )


def _absent(choose: Callable[[_device.Implementation], object]) -> dict[str, str]:
    reasons = {}
    for implementation in get_args(_device.Implementation):
        try:
            choose(implementation)
        except NotImplementedError as error:
            reasons[implementation] = str(error)
    return reasons
