"""The tables of docs/results/status.md: the kernels of each op, from registry and sources, and where functions ran."""

import re
from collections.abc import Iterator
from pathlib import Path

from mxep.core_kernels.launch import KernelOp
from mxep.core_kernels.registry import OPS
from mxep.cpp_bindings import ffi_targets

CORE = Path(__file__).parents[2] / "core_kernels"
CUDA = re.compile(r"^void (\w+)\(const Call& call, cudaStream_t stream\) \{", re.MULTILINE)

# Function, then its state in torch on a CPU, JAX on a CPU, torch on sm_90, JAX on sm_90, and on sm_100.
FUNCTIONS = (
    ("the experts' feed-forward", "tested", "tested", "ran", "ran", "not tested"),
    ("MoE layer and its gradients", "tested", "tested", "ran", "ran", "not tested"),
    ("expert parallelism, training", "tested, ep 1, 2, 4", "tested, ep 1, 2, 4", "ran, 2 and 4 GPUs of a host",
     "ran, 2 and 4 GPUs of a host, one process", "not tested"),
    ("folded operands, `fp8_rowwise`, cached weights", "tested, ep 1, 2, 4", "tested, ep 1, 2, 4", "ran, one GPU",
     "ran, one GPU", "not tested"),
    ("grouped GEMMs on the exact path", "tested", "tested", "ran, bf16 CUDA C++ on dequantized operands",
     "ran, bf16 CUDA C++ on dequantized operands", "compiled, `tcgen05.mma` with block scales"),
    ("grouped GEMMs of folded operands", "tested", "tested", "ran, CUDA C++", "ran, CUDA C++", "compiled, Triton"),
)  # fmt: skip


def _family(op: KernelOp) -> str:
    """The folder of the op's plan: mxep.core_kernels.<family>.plan."""
    return op.check.__module__.split(".")[2]


def _cuda_files(family: str) -> dict[str, Path]:
    """Name of an op -> the file that defines its CUDA kernel."""
    paths = sorted((CORE / family).rglob("cuda*.cu"))
    return {name: path for path in paths for name in CUDA.findall(path.read_text())}


def _rows() -> Iterator[tuple[str, ...]]:
    cpp = ffi_targets()
    for name, op in OPS.items():
        family = _family(op)
        cuda = _cuda_files(family)
        in_cuda = "" if name not in cuda else "sm_90" if "sm90" in cuda[name].name else "sm_90, sm_100"
        on_cpu = "C++" if name in cpp else "the framework's matmul"
        yield family, f"`{name}`", on_cpu, "Triton" if op.kernel else "composed of other ops", in_cuda


def _table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]


def tables() -> str:
    """Both tables."""
    kernels = _table(("family", "op", "CPU", "GPU", "CUDA C++"), _rows())
    functions = ("function", "torch, CPU", "JAX, CPU", "torch, sm_90", "JAX, sm_90", "sm_100")
    return "\n".join([
        "## Kernels", "", *kernels, "", "## Functions", "", *_table(functions, iter(FUNCTIONS)),
    ])  # fmt: skip
