"""The definition of the balanced fold in numpy: exact bytes."""

import numpy as np

from ..formats import BLOCK, E8M0_NAN
from ..oracle_math import E4M3_VALUES, Array, Pair, group_slices, to_e4m3


def balance_scales(sf: Array) -> Pair:
    """sf (G, N, B) -> balanced_sf (G, N, B), lift (G, B): the largest scale of the group less the block's largest."""
    byte = sf.astype(np.int32)
    top = np.where(sf == E8M0_NAN, 0, byte).max(1, initial=0)
    lift = np.where(top > 0, top.max(1, initial=0, keepdims=True) - top, 0)
    return np.where(sf == E8M0_NAN, E8M0_NAN, byte + lift[:, None]).astype(np.uint8), lift.astype(np.uint8)


def fold_rows_balanced(q: Array, sf: Array, lift: Array, group_ends: Array) -> Pair:
    """q (M, K), sf (M, K/32), lift (G, K/32) -> qf (M, K), row_sf (M,)."""
    byte = sf.astype(np.int32)
    for group, rows in enumerate(group_slices(group_ends)):
        byte[rows] -= lift[group]
    none = (sf == E8M0_NAN).all(-1)
    row = np.maximum(np.where(sf == E8M0_NAN, -1, byte).max(-1), 0)
    factor = np.where(sf == E8M0_NAN, np.nan, np.ldexp(1.0, byte - row[:, None]))
    return to_e4m3(E4M3_VALUES[q] * np.repeat(factor, BLOCK, axis=-1)), np.where(none, E8M0_NAN, row).astype(np.uint8)
