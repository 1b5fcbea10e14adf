"""The definition of the folded products in numpy: exact operand values, sums in fp64, rounded once.

grouped_mm_fold       qf 2^(lhs_sf - 127)  x  qf 2^(rhs_sf - 127)   one scale per row
grouped_mm_fold_bias  the same, plus bias before the rounding
grouped_mm_fold_sum   the sum of two such products before the rounding
grouped_wgrad_fold    the same, one scale per row and span of 256 tokens
..._pair              two products with one operand in common
"""

import numpy as np

from ...fold.oracle import span_values
from ...oracle_math import E4M3_VALUES, Array, e8m0_value, group_slices, round_to
from ..exact.oracle import k_grouped, m_grouped


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
    """grouped_mm_fold plus the group's row of bias (G, N) fp32; rows past the last end stay zeros."""
    out = grouped_mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, "float64")
    for group, rows in enumerate(group_slices(group_ends)):
        out[rows] += bias[group].astype(np.float64)
    return round_to(out, out_dtype)


def grouped_mm_fold_sum(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array,
    lhs2_qf: Array, lhs2_sf: Array, rhs2_qf: Array, rhs2_sf: Array, group_ends: Array, out_dtype: str = "bfloat16",
) -> Array:  # fmt: skip
    """lhs rhs^T + lhs2 rhs2^T for the group of each row; rows past the last end are zeros."""
    first = grouped_mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, "float64")
    return round_to(first + grouped_mm_fold(lhs2_qf, lhs2_sf, rhs2_qf, rhs2_sf, group_ends, "float64"), out_dtype)


def grouped_wgrad_fold(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs_t (N, M), (S, N) x rhs_t (K, M), (S, K) -> out (G, N, K); an empty group gives zeros."""
    lhs, rhs = span_values(lhs_qf, lhs_sf, group_ends), span_values(rhs_qf, rhs_sf, group_ends)
    return k_grouped(lhs.T, rhs.T, group_ends, out_dtype)


def grouped_mm_fold_pair(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, rhs2_qf: Array, rhs2_sf: Array, group_ends: Array,
    out_dtype: str = "bfloat16",
) -> tuple[Array, Array]:  # fmt: skip
    """lhs rhs^T and lhs rhs2^T for the group of each row."""
    first = grouped_mm_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out_dtype)
    return first, grouped_mm_fold(lhs_qf, lhs_sf, rhs2_qf, rhs2_sf, group_ends, out_dtype)


def grouped_wgrad_fold_pair(
    lhs_qf: Array, lhs_sf: Array, rhs_qf: Array, rhs_sf: Array, lhs2_qf: Array, lhs2_sf: Array, group_ends: Array,
    out_dtype: str = "bfloat16",
) -> tuple[Array, Array]:  # fmt: skip
    """lhs rhs^T and lhs2 rhs^T over the tokens of each group."""
    first = grouped_wgrad_fold(lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out_dtype)
    return first, grouped_wgrad_fold(lhs2_qf, lhs2_sf, rhs_qf, rhs_sf, group_ends, out_dtype)
