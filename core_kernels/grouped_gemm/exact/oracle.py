"""The definition of the grouped products in numpy: exact operand values, sums in fp64, rounded once."""

import numpy as np

from ...oracle_math import Array, group_slices, round_to
from ...quantize.oracle import dequantize64


def m_grouped(lhs: Array, rhs_t: Array, group_ends: Array, out_dtype: str) -> Array:
    """lhs (M, K) x rhs_t (G, N, K) -> out (M, N); rows past the last end are zeros."""
    out = np.zeros((lhs.shape[0], rhs_t.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for g, rows in enumerate(group_slices(group_ends)):
            out[rows] = lhs[rows].astype(np.float64) @ rhs_t[g].astype(np.float64).T
    return round_to(out, out_dtype)


def k_grouped(lhs: Array, rhs: Array, group_ends: Array, out_dtype: str) -> Array:
    """lhs (M, N) x rhs (M, K) -> out (G, N, K); an empty group gives zeros."""
    out = np.zeros((len(group_ends), lhs.shape[1], rhs.shape[1]))
    with np.errstate(invalid="ignore", over="ignore"):
        for g, rows in enumerate(group_slices(group_ends)):
            out[g] = lhs[rows].astype(np.float64).T @ rhs[rows].astype(np.float64)
    return round_to(out, out_dtype)


def grouped_mm_mx(
    lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs (M, K) x rhs_t (G, N, K), both MXFP8 along K -> out (M, N); rows past the last end are zeros."""
    return m_grouped(dequantize64(lhs_q, lhs_sf), dequantize64(rhs_q, rhs_sf), group_ends, out_dtype)


def grouped_mm_bf16(lhs: Array, rhs_t: Array, group_ends: Array, out_dtype: str = "bfloat16") -> Array:
    """lhs (M, K) x rhs_t (G, N, K), both bf16 -> out (M, N); rows past the last end are zeros."""
    return m_grouped(lhs, rhs_t, group_ends, out_dtype)


def grouped_mm_bf16_kn(lhs: Array, rhs: Array, group_ends: Array, out_dtype: str = "bfloat16") -> Array:
    """lhs (M, K) x rhs (G, K, N), both bf16 -> out (M, N); rows past the last end are zeros."""
    return m_grouped(lhs, np.swapaxes(rhs, 1, 2), group_ends, out_dtype)


def grouped_mm_bf16_kn_sum(
    lhs: Array, rhs: Array, lhs2: Array, rhs2: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs rhs[g] + lhs2 rhs2[g] for the group of each row, rounded once."""
    first, second = (grouped_mm_bf16_kn(*pair, group_ends, "float64") for pair in ((lhs, rhs), (lhs2, rhs2)))
    return round_to(first + second, out_dtype)


def grouped_wgrad_mx(
    lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs_t (N, M) x rhs_t (K, M), both MXFP8 along M -> out (G, N, K); an empty group gives zeros."""
    return k_grouped(dequantize64(lhs_q, lhs_sf).T, dequantize64(rhs_q, rhs_sf).T, group_ends, out_dtype)


def grouped_wgrad_bf16(lhs: Array, rhs: Array, group_ends: Array, out_dtype: str = "bfloat16") -> Array:
    """lhs (M, N) x rhs (M, K), both bf16 -> out (G, N, K); an empty group gives zeros."""
    return k_grouped(lhs, rhs, group_ends, out_dtype)


def grouped_wgrad_bf16_t(lhs_t: Array, rhs_t: Array, group_ends: Array, out_dtype: str = "bfloat16") -> Array:
    """`grouped_wgrad_bf16` of lhs_t (N, M) and rhs_t (K, M)."""
    return k_grouped(lhs_t.T, rhs_t.T, group_ends, out_dtype)
