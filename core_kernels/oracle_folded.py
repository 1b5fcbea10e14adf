"""The folded products by definition: the exact values of the folded operands, summed in fp64, rounded once.

    grouped_mm_fold     qf 2^(lhs_sf - 127)  x  qf 2^(rhs_sf - 127)   one scale per row
    grouped_wgrad_fold  the same, one scale per row and group of tokens
    fold_groups         bytes, exact
    quantize_rowwise    bytes, exact                                  what the first multiplies, straight from floats

Functions have the names and the argument order of the ops they define.
"""

import numpy as np

from .formats import BLOCK, Rounding
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
)


def grouped_mm_fold(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs (M, K), (M,) x rhs_t (G, N, K), (G, N) -> out (M, N); rows past the last end are zeros."""
    lhs, rhs = (E4M3_VALUES[q] * e8m0_value(sf)[..., None] for q, sf in ((lhs_qf, lhs_sf), (rhs_qf, rhs_sf)))
    return m_grouped(lhs, rhs, group_ends, out_dtype)


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
