"""The definition of the row gathers in numpy. Bytes are exact."""

import numpy as np

from ..formats import BLOCK
from ..oracle_math import Array, Pair, round_to


def permute_rows(x: Array, row_map: Array) -> Array:
    """x (R, K), row_map (P,) -> out (P, K): row row_map[i] of x, or zeros where it is -1."""
    out = np.zeros((len(row_map), x.shape[1]), x.dtype)
    for i, row in enumerate(row_map):
        if row >= 0:
            out[i] = x[row]
    return out


def permute_rows_vjp(dout: Array, row_map: Array, num_rows: int) -> Array:
    """Cotangent of x: the sum of dout over all copies of a row, rounded once to dout's dtype."""
    dx = np.zeros((num_rows, dout.shape[1]))
    for i, row in enumerate(row_map):
        if row >= 0:
            dx[row] += dout[i].astype(np.float64)
    return round_to(dx, dout.dtype.name)


def permute_mx(packed: Array, row_map: Array) -> Pair:
    """packed (R, K + K/32), row_map (P,) -> q (P, K), sf (P, K/32)."""
    k = packed.shape[1] // (BLOCK + 1) * BLOCK
    rows = permute_rows(packed, row_map)
    return np.ascontiguousarray(rows[:, :k]), np.ascontiguousarray(rows[:, k:])
