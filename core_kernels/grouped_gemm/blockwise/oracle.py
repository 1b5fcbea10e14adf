"""The definition of the blockwise product in numpy: exact operand values, sums in fp64, rounded once."""

from ...oracle_math import Array, round_to
from ...quantize.oracle_blockwise import row_values, square_values
from ..exact.oracle import m_grouped


def grouped_mm_blockwise(
    lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array, group_ends: Array, out_dtype: str = "bfloat16"
) -> Array:
    """lhs (M, K), (M, K/128) x rhs_t (G, N, K), (G, N/128, K/128) -> out (M, N); rows past the last end are zeros."""
    return m_grouped(row_values(lhs_q, lhs_sf), square_values(rhs_q, rhs_sf), group_ends, out_dtype)


def grouped_mm_blockwise_sum(
    lhs_q: Array, lhs_sf: Array, rhs_q: Array, rhs_sf: Array,
    lhs2_q: Array, lhs2_sf: Array, rhs2_q: Array, rhs2_sf: Array, group_ends: Array, out_dtype: str = "bfloat16",
) -> Array:  # fmt: skip
    """lhs rhs^T + lhs2 rhs2^T for the group of each row; rows past the last end are zeros."""
    first = grouped_mm_blockwise(lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, "float64")
    return round_to(first + grouped_mm_blockwise(lhs2_q, lhs2_sf, rhs2_q, rhs2_sf, group_ends, "float64"), out_dtype)
