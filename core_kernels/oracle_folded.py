"""The folded products by definition: the exact values of the folded operands, summed in fp64, rounded once.

    grouped_mm_fold     qf 2^(lhs_sf - 127)  x  qf 2^(rhs_sf - 127)   one scale per row
    grouped_mm_fold_bias    the same, + bias before the one rounding
    grouped_wgrad_fold  the same, one scale per row and group of tokens
    fold_groups         bytes, exact
    quantize_rowwise    bytes, exact                                  what the first multiplies, straight from floats
    quantize_row_fold_col_scales  group_scales  quantize_col_fold     bytes, exact: both operands, from two reads of x

Functions have the names and the argument order of the ops they define.
"""

import numpy as np

from .formats import BLOCK, E8M0_NAN, Rounding
from .oracle import (
    E4M3_VALUES,
    Array,
    Pair,
    e8m0_value,
    fold_rows,
    group_slices,
    k_grouped,
    m_grouped,
    quantize_blocks,
    quantize_col,
    quantize_row_fold,
    round_to,
    to_e4m3,
)


def grouped_mm_fold(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs (M, K), (M,) x rhs_t (G, N, K), (G, N) -> out (M, N); rows past the last end are zeros."""
    lhs, rhs = (E4M3_VALUES[q] * e8m0_value(sf)[..., None] for q, sf in ((lhs_qf, lhs_sf), (rhs_qf, rhs_sf)))
    return m_grouped(lhs, rhs, group_ends, out_dtype)


def grouped_mm_fold_bias(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, bias: Array, group_ends: Array,
    out_dtype: str = "bfloat16",
) -> Array:  # fmt: skip
    """grouped_mm_fold + bias (G, N) fp32, each group's row of it; rows past the last end stay zeros."""
    out = grouped_mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, "float64")
    for group, rows in enumerate(group_slices(group_ends)):
        out[rows] += bias[group].astype(np.float64)
    return round_to(out, out_dtype)


def group_values(qf: Array, group_sf: Array, group_ends: Array) -> Array:
    """qf (R, M), group_sf (G, R) -> the values (R, M); columns past the last end are zeros."""
    out = np.zeros(qf.shape)
    for group, columns in enumerate(group_slices(group_ends)):
        out[:, columns] = E4M3_VALUES[qf[:, columns]] * e8m0_value(group_sf[group])[:, None]
    return out


def grouped_wgrad_fold(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs_t (N, M), (G, N) x rhs_t (K, M), (G, K) -> out (G, N, K); an empty group gives zeros."""
    lhs, rhs = group_values(lhs_qf, lhs_sf, group_ends), group_values(rhs_qf, rhs_sf, group_ends)
    return k_grouped(lhs.T, rhs.T, group_ends, out_dtype)


def fold_groups(q: Array, sf: Array, group_ends: Array) -> Pair:
    """q (R, M), sf (R, M/32) -> qf (R, M), group_sf (G, R): fold_rows of every group of columns.

    Columns past the last end become zeros; a group without columns has scale 0.
    """
    qf, group_sf = np.zeros_like(q), np.zeros((len(group_ends), len(q)), np.uint8)
    for group, columns in enumerate(group_slices(group_ends)):
        if columns.start < columns.stop:
            blocks = slice(columns.start // BLOCK, columns.stop // BLOCK)
            qf[:, columns], group_sf[group] = fold_rows(q[:, columns], sf[:, blocks])
    return qf, group_sf


def quantize_rowwise(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Pair:
    """x (..., K) -> qf (..., K), row_sf (...): quantize_row with the row as its one block."""
    return quantize_blocks(x, rounding, satfinite)


def quantize_row_fold_col_scales(
    x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[Array, Array, Array]:
    """x (M, K) -> qf (M, K), row_sf (M,) of quantize_row_fold, col_sf (M/32, K): quantize_col's sf, as x lies."""
    col_sf = np.ascontiguousarray(quantize_col(x, rounding, satfinite)[1].T)
    return *quantize_row_fold(x, rounding, satfinite), col_sf


def group_scales(col_sf: Array, group_ends: Array) -> Array:
    """col_sf (B, K) -> group_sf (G, K): the largest byte of a group's blocks but NaN's 255; 0 for an empty group."""
    group_sf = np.zeros((len(group_ends), col_sf.shape[1]), np.uint8)
    for group, rows in enumerate(group_slices(group_ends)):
        blocks = col_sf[rows.start // BLOCK : rows.stop // BLOCK].astype(np.int32)
        if len(blocks):
            largest = np.where(blocks == E8M0_NAN, -1, blocks).max(0)
            group_sf[group] = np.where(largest < 0, E8M0_NAN, largest)
    return group_sf


def quantize_col_fold(
    x: Array, group_sf: Array, group_ends: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> Array:
    """x (M, K), group_sf (G, K) -> qf_t (K, M): quantize_col, each group of columns then under its scale.

    With the scales of group_scales: the qf of fold_groups. Columns past the last end become zeros.
    """
    q_t, sf_t = quantize_col(x, rounding, satfinite)
    qf_t = np.zeros_like(q_t)
    for group, columns in enumerate(group_slices(group_ends)):
        byte = sf_t[:, columns.start // BLOCK : columns.stop // BLOCK].astype(np.int32)
        shift = byte - group_sf[group].astype(np.int32)[:, None]
        factor = np.where(byte == E8M0_NAN, np.nan, np.ldexp(1.0, shift))
        qf_t[:, columns] = to_e4m3(E4M3_VALUES[q_t[:, columns]] * np.repeat(factor, BLOCK, axis=1))
    return qf_t
