"""Which implementation runs each op on a platform, and why the others do not."""

import importlib.util
from typing import Literal, NamedTuple

import jax

from ..core_kernels.launch import KernelOp, fail
from . import _cpu_gemm, _triton
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
    absent = {"triton": f"{op.name}: jax-triton runs kernels on CUDA alone"}
    if op.name in CPP_TARGETS:
        return Capability("cpp", absent)
    absent["cpp"] = f"{op.name}: grouped products have no C++ kernel; on a CPU jax multiplies"
    return Capability("jax matmul on operands dequantized in C++" if op.name in _cpu_gemm.GEMMS else "", absent)


def _on_cuda(op: KernelOp) -> Capability:
    absent = {"cpp": f"{op.name}: the C++ kernels run on the CPU alone"}
    if op.kernel is None:
        return Capability("", absent | {"triton": f"{op.name}: it has no Triton kernel"})
    if importlib.util.find_spec("jax_triton") is None:
        return Capability("", absent | {"triton": "jax-triton is missing: pip install 'mxep[jax-cuda]'"})
    try:
        return Capability(f"triton, {_triton.arch()}", absent)
    except NotImplementedError as error:
        return Capability("", absent | {"triton": str(error)})
