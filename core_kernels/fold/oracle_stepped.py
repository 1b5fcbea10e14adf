"""The definition of the stepped fold in numpy: exact bytes."""

import numpy as np

from ..formats import BLOCK, E8M0_MAX, E8M0_NAN, STAGE, STAGES_OF_WORD, STEP_ABOVE, STEP_BELOW, STEP_OCTAVES
from ..oracle_math import E4M3_VALUES, Array, Pair, to_e4m3


def step_scales(sf: Array) -> Pair:
    """sf (..., B) -> the scale bytes of the rows (...), and of the blocks (..., B)."""
    byte = sf.astype(np.int32)
    plain = (sf != 0) & (sf != E8M0_NAN)
    number = plain.sum(-1, keepdims=True)
    in_order = np.sort(np.where(plain, byte, E8M0_NAN), -1)
    median = np.take_along_axis(in_order, np.maximum(number - 1, 0) // 2, -1)
    row = np.where(plain & (byte <= median + STEP_ABOVE), byte, 0).max(-1, keepdims=True)
    distance = np.where(plain, byte - row, 0)
    above = -(-np.maximum(distance, 0) // STEP_OCTAVES)
    below = np.where(distance < -STEP_BELOW, -distance // STEP_OCTAVES, 0)
    blocks = np.minimum(row + STEP_OCTAVES * (above - below), E8M0_MAX)
    return row[..., 0].astype(np.uint8), blocks.astype(np.uint8)


def _bits(flags: Array) -> Array:
    """(..., words, 32) -> (..., words) int32, the first flag in the lowest bit."""
    return (flags.astype(np.uint32) << np.arange(STAGES_OF_WORD, dtype=np.uint32)).sum(-1, dtype=np.uint32).view("i4")


def _padded(x: Array, axis: int, multiple: int) -> Array:
    return np.pad(x, [(0, -x.shape[a] % multiple if a == axis % x.ndim else 0) for a in range(x.ndim)])


def blocks_apart(row_sf: Array, scales: Array) -> Array:
    """Scale bytes of rows (..., M) and blocks (..., M, B) -> apart (..., ceil(M/32), ceil(B/128)) int32."""
    steps = STAGE // BLOCK
    apart = _padded(_padded(scales != row_sf[..., None], -1, steps * STAGES_OF_WORD), -2, BLOCK)
    *lead, m, blocks = apart.shape
    words = blocks // (steps * STAGES_OF_WORD)
    return _bits(apart.reshape(*lead, m // BLOCK, BLOCK, words, STAGES_OF_WORD, steps).max(-1).max(-3))


def fold_rows_stepped(q: Array, sf: Array) -> tuple[Array, Array, Array, Array]:
    """q (..., M, K), sf (..., M, K/32) -> qf (..., M, K), row_sf (..., M), step_sf (..., K/32, M), apart."""
    row_sf, scales = step_scales(sf)
    factor = np.where(sf == E8M0_NAN, np.nan, np.ldexp(1.0, sf.astype(np.int32) - scales))
    qf = to_e4m3(E4M3_VALUES[q] * np.repeat(factor, BLOCK, axis=-1))
    return qf, row_sf, np.ascontiguousarray(np.swapaxes(scales, -1, -2)), blocks_apart(row_sf, scales)
