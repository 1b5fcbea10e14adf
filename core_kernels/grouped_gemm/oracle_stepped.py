"""The definition of the stepped product in numpy: exact operand values, sums in fp64, rounded once."""

import numpy as np

from ..formats import BLOCK
from ..oracle_math import E4M3_VALUES, Array, e8m0_value
from .oracle import m_grouped


def stepped_values(qf: Array, step_sf: Array) -> Array:
    """qf (..., M, K), step_sf (..., K/32, M) -> the values (..., M, K)."""
    return E4M3_VALUES[qf] * np.repeat(np.swapaxes(e8m0_value(step_sf), -1, -2), BLOCK, axis=-1)


def grouped_mm_fold_stepped(
    lhs_qf: Array, lhs_sf: Array, lhs_changes: Array, rhs_qf: Array, rhs_sf: Array, rhs_changes: Array,
    group_ends: Array, out_dtype: str = "bfloat16",
) -> Array:  # fmt: skip
    """lhs (M, K), (K/32, M) x rhs_t (G, N, K), (G, K/32, N) -> out (M, N); `changes` repeats what the scales say."""
    return m_grouped(stepped_values(lhs_qf, lhs_sf), stepped_values(rhs_qf, rhs_sf), group_ends, out_dtype)
