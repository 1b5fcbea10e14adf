"""The definition of the stepped product in numpy: exact operand values, sums in fp64, rounded once."""

import numpy as np

from ..formats import BLOCK
from ..oracle_math import E4M3_VALUES, Array, e8m0_value
from .oracle import m_grouped


def stepped_values(qf: Array, step_sf: Array) -> Array:
    """qf (..., M, K), step_sf (..., K/32, M) -> the values (..., M, K)."""
    return E4M3_VALUES[qf] * np.repeat(np.swapaxes(e8m0_value(step_sf), -1, -2), BLOCK, axis=-1)


def grouped_mm_fold_stepped(
    lhs_qf: Array, lhs_sf: Array, lhs_step_sf: Array, lhs_apart: Array,
    rhs_qf: Array, rhs_sf: Array, rhs_step_sf: Array, rhs_apart: Array, group_ends: Array, out_dtype: str = "bfloat16",
) -> Array:  # fmt: skip
    """lhs (M, K), (K/32, M) x rhs_t (G, N, K), (G, K/32, N) -> out (M, N); the scales of blocks say all."""
    lhs, rhs = stepped_values(lhs_qf, lhs_step_sf), stepped_values(rhs_qf, rhs_step_sf)
    return m_grouped(lhs, rhs, group_ends, out_dtype)
