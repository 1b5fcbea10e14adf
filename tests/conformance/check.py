"""The three grades of comparison: exact bytes, the error bound of a product, SQNR in dB.

Ops are compared with their definitions by mxep.core_kernels.conformance, grouped products with fp64 sums; a
feed-forward or a layer expert by expert.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from mxep.core_kernels.cases import Case
from mxep.core_kernels.conformance import check
from mxep.core_kernels.conformance.check import FP8_CHAIN, Definition
from mxep.core_kernels.grouped_gemm.exact import oracle
from mxep.core_kernels.registry import OPS

from ..compare import gemm_bound, same_bytes, sqnr_db
from .backends import loaded, offers

__all__ = [
    "FP8_CHAIN",
    "as_defined",
    "definition_db",
    "expert_db",
    "fp8_chain",
    "fp8_sums",
    "gemm_bound",
    "k_grouped",
    "m_grouped",
    "same_bytes",
    "same_specified",
    "sqnr_db",
    "sums",
]

Array = np.ndarray
FP8_FORMS = ("fold", "row", "block", "block_power_of_two")
"""Operand forms that the FP8 tensor cores of sm_90 multiply."""


def fp8_chain(backend: str) -> float:
    """`FP8_CHAIN` where FP8 tensor cores sum the backend's folded products."""
    return check.fp8_chain(loaded(backend))


def sums(backend: str) -> str:
    """`sums` of the reference's products (products.py) for the backend's device."""
    return "sm_90" if offers(backend, "SM90_SUMS") else "exact"


def fp8_sums(backend: str, op: str, got: Array, *operands: Array) -> None:
    """Where Hopper's tensor cores sum, assert that got = op(*operands) has the bytes of oracle_sm90.py."""
    check.fp8_sums(loaded(backend), op, got, *operands)


def as_defined(backend: str, case: Case, got: Any) -> None:
    """`as_defined` of mxep.core_kernels.conformance.check."""
    check.as_defined(loaded(backend), definition(case), got)


@lru_cache(maxsize=1)
def definition(case: Case) -> Definition:
    """Kept for the next backend of the case."""
    return Definition(case)


def same_specified(name: str, arrays: Sequence[Array], got: Sequence[Array], want: Sequence[Array]) -> None:
    """Assert the same shapes, and the same bytes where the op specifies them."""
    assert [x.shape for x in got] == [x.shape for x in want]
    same_bytes(*(OPS[name].specified(arrays, x) for x in (got, want)))


def m_grouped(got: Array, lhs: Array, rhs_t: Array, group_ends: Array, chain: float = 0) -> None:
    """Assert the bound for got = lhs (M, K) x rhs_t (G, N, K), of the values that are multiplied."""
    exact = oracle.grouped_mm_bf16(lhs, rhs_t, group_ends, "float64")
    magnitude = oracle.grouped_mm_bf16(np.abs(lhs), np.abs(rhs_t), group_ends, "float64")
    gemm_bound(got, exact, magnitude, lhs.shape[1], chain)


def k_grouped(got: Array, lhs: Array, rhs: Array, group_ends: Array, chain: float = 0) -> None:
    """Assert the bound for got = lhs (M, N) x rhs (M, K) -> (G, N, K), a group's sum of its own rows' products."""
    exact = oracle.grouped_wgrad_bf16(lhs, rhs, group_ends, "float64")
    magnitude = oracle.grouped_wgrad_bf16(np.abs(lhs), np.abs(rhs), group_ends, "float64")
    sizes = np.diff(group_ends, prepend=0)
    for g, size in enumerate(sizes):
        gemm_bound(got[g], exact[g], magnitude[g], int(size), chain)


def expert_db(got: dict[str, Array], want: dict[str, Array], rows: Array) -> dict[str, float]:
    """The SQNR of the worst expert, by the name of a result.

    rows (E, T), bool: the rows that each expert takes part in, of results without a dim of experts. Weights,
    biases and "router" have an expert as their first dim. The router's row of an expert without rows is left out: its
    exact gradient is zero, its fp32 gradient is not.
    """
    assert got.keys() == want.keys()
    used = np.flatnonzero(rows.any(1))
    parts = dict.fromkeys(("w1", "w3", "w2", "b1", "b3", "b2"), range(len(rows))) | {"router": used}
    found = {}
    for name, value in want.items():
        assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype), name
        found[name] = min(sqnr_db(got[name][part], value[part]) for part in parts.get(name, rows[used]))
    return found


CPU_DB = check.FFN_DB
"""An expert that is 5% off is at 26 dB (test_check.py)."""
# Measured on an H200 at least 62.3, of recipe "bf16", less 10. The definition sums FP8 products as the tensor cores do
# (`sums`): with exact sums about one E4M3 code in a hundred would round the other way, which is 38 dB.
GPU_DB = 52.3


def definition_db(backend: str) -> float:
    """The least dB of an expert."""
    return GPU_DB if offers(backend, "FP8_TENSOR_CORES") else CPU_DB
