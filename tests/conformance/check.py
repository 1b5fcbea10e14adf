"""The three grades of comparison: exact bytes, the error bound of a product, SQNR in dB.

Ops are compared here with their oracles, grouped products with fp64 sums; a feed-forward or a layer expert by expert.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from mxep.core_kernels.cases import Arrays, Case
from mxep.core_kernels.grouped_gemm.exact import oracle
from mxep.core_kernels.grouped_gemm.folded import oracle_sm90
from mxep.core_kernels.swiglu import oracle as swiglu_oracle

from ..compare import gemm_bound, same_bytes, sqnr_db
from .backends import KERNEL_OPS, offers
from .definitions import DEFINITIONS

__all__ = [
    "FP8_CHAIN",
    "as_defined",
    "definition",
    "definition_db",
    "dprob_bound",
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
FP8_CHAIN = 2.0**-9
"""The largest loss of an FP8 tensor core of sm_90, relative to sum|a||b|. It aligns 32 products and the sum so far to
the largest of them and cuts each below 2^-13 of it. At worst that is 33 * 2^-13 for every 32 terms; measured 2^-11
where a group has 32 terms of widely spread magnitudes, 2^-14 at 7168. `fp8_sums` is the sharper test, of operands that
lose more too."""

FP8_FORMS = ("fold", "row", "block", "block_power_of_two")
"""Operand forms that the FP8 tensor cores of sm_90 multiply."""


def fp8_chain(backend: str) -> float:
    """`FP8_CHAIN` where FP8 tensor cores sum the backend's folded products."""
    return FP8_CHAIN if offers(backend, "FP8_TENSOR_CORES") else 0


def sums(backend: str) -> str:
    """`sums` of the reference's products (products.py) for the backend's device."""
    return "sm_90" if offers(backend, "SM90_SUMS") else "exact"


def fp8_sums(backend: str, op: str, got: Array, *operands: Array) -> None:
    """Where Hopper's tensor cores sum, assert that got = op(*operands) has the bytes of oracle_sm90.py."""
    if sums(backend) == "sm_90":
        same_bytes(got, getattr(oracle_sm90, op)(*operands, got.dtype.name))


@lru_cache(maxsize=1)
def definition(case: Case) -> tuple[Arrays, Arrays]:
    """The inputs of a case, and the outputs of its definition. Kept for the next backend of the case. With optional
    group ends it defines other rows too."""
    arrays = case.arrays()
    op = KERNEL_OPS[case.op]
    defined = arrays[:-1] if op.optional_ends and len(arrays) == len(op.inputs) else arrays
    want = DEFINITIONS[case.op](*defined, **case.options_of())
    return arrays, tuple(want) if isinstance(want, tuple | list) else (want,)


def as_defined(backend: str, case: Case, got: Any) -> None:
    """Assert the bytes of the definition, where the op specifies them. A last output that is a sum in any order is
    within its bound instead."""
    arrays, want = definition(case)
    got = with_rest(case, arrays, got if isinstance(got, tuple | list) else (got,), want)
    if case.op == "permute_rows":  # which copies the bits of a NaN
        got, want = ([x.view(f"u{x.itemsize}") for x in of] for of in (got, want))
    bound = next((bound for start, bound in BOUNDS.items() if case.op.startswith(start)), None)
    if bound and want[-1].size:
        *got, total = got
        *want, last = want
        assert (total.shape, total.dtype) == (last.shape, last.dtype)
        bound(backend, case, total, arrays)
    same_bytes(got, want)


def with_rest(case: Case, arrays: Arrays, got: Sequence[Array], want: Arrays) -> list[Array]:
    """got, with the values of `want` where the op leaves them unspecified: past the last end."""
    assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]
    op, filled = KERNEL_OPS[case.op], [np.array(w) for w in want]
    for part, found in zip(op.specified(arrays, filled), op.specified(arrays, got), strict=True):
        part[...] = found
    return filled


def same_specified(name: str, arrays: Sequence[Array], got: Sequence[Array], want: Sequence[Array]) -> None:
    """Assert the same shapes, and the same bytes where the op specifies them."""
    assert [x.shape for x in got] == [x.shape for x in want]
    same_bytes(*(KERNEL_OPS[name].specified(arrays, x) for x in (got, want)))


def dprob_bound(backend: str, case: Case, got: Array, arrays: Arrays) -> None:
    """The terms are exact; the order of their sum is not defined."""
    numbers = {name: x for name, x in case.options_of().items() if name in ("alpha", "limit", "offset")}
    with np.errstate(invalid="ignore"):
        terms = swiglu_oracle.dprob_terms(*arrays[:3], **numbers).astype(np.float64)
        exact = np.where(np.abs(terms.sum(-1)) > np.finfo(np.float32).max, np.inf * terms.sum(-1), terms.sum(-1))
    gemm_bound(got, exact, np.abs(terms).sum(-1), terms.shape[1])


def dprobs_bound(backend: str, case: Case, got: Array, arrays: Arrays) -> None:
    """Each dot product is within the bound, and zero for an empty slot."""
    dy, rows, slots, *_ = arrays
    none, width = slots < 0, rows.shape[1]
    gathered = rows[np.where(none, 0, slots)] if rows.size else np.zeros((*none.shape, width))
    x = np.where(none[..., None], 0, gathered.astype(np.float64))
    dy = np.where(none[..., None], 0, dy.astype(np.float64)[:, None])
    with np.errstate(invalid="ignore"):
        exact, magnitude = (x * dy).sum(-1), np.abs(x * dy).sum(-1)
    gemm_bound(got, exact, magnitude, width)
    same_bytes(got[none], np.zeros(none.sum(), np.float32))


@lru_cache(maxsize=1)
def product_sums(case: Case) -> tuple[Array, Array]:
    """The fp64 sums of a grouped product, and of the magnitudes of its terms."""
    arrays, _ = definition(case)
    named = zip(KERNEL_OPS[case.op].inputs, arrays, strict=True)
    positive = [x if name.endswith(("sf", "ends")) else x & 0x7F if x.dtype == np.uint8 else np.abs(x)
                for name, x in named]  # fmt: skip
    exact, magnitude = (DEFINITIONS[case.op](*of, out_dtype="float64") for of in (arrays, positive))
    return exact, magnitude


def product_bound(backend: str, case: Case, got: Array, arrays: Arrays) -> None:
    """The bound of a grouped product. It is zero for rows past the last end and for groups without tokens."""
    named = dict(zip(KERNEL_OPS[case.op].inputs, arrays, strict=True))
    exact, magnitude = product_sums(case)
    terms = sum(x.shape[1] for name, x in named.items() if re.fullmatch(r"lhs2?(_qf?)?", name))
    # fp32 roundings of a term of a blockwise sum, in halves of 2^-23: two scaled operands, or a product of scales and
    # of a partial sum
    terms += 4 * (case.op == "grouped_mm_blockwise") + ("bias" in named)
    if "wgrad" in case.op:
        terms = np.diff(arrays[-1], prepend=0)[:, None, None]
    of_fp8 = hasattr(oracle_sm90, case.op)
    gemm_bound(got, exact, magnitude, terms, fp8_chain(backend) if of_fp8 else 0)
    if of_fp8:
        fp8_sums(backend, case.op, got, *arrays)


BOUNDS = {"swiglu_bwd": dprob_bound, "combine_bwd": dprobs_bound, "grouped_": product_bound}
"""First letters of ops -> the bound of their last output."""


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


# dB of the worst expert from the quantized definition: measured on CPUs at least 66.9, less 10. The 66.9 are one bf16
# value of an expert with few rows, which rounds the other way; another matmul sums in another order. An expert that is
# 5% off is at 26 dB (test_check.py).
CPU_DB = 56.9
# Measured on an H200 at least 62.3, of recipe "bf16", less 10. The definition sums FP8 products as the tensor cores do
# (`sums`): with exact sums about one E4M3 code in a hundred would round the other way, which is 38 dB.
GPU_DB = 52.3


def definition_db(backend: str) -> float:
    """The least dB of an expert."""
    return GPU_DB if offers(backend, "FP8_TENSOR_CORES") else CPU_DB
