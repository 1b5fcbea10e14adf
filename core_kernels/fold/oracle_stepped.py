"""The definition of the stepped fold in numpy: exact bytes."""

import numpy as np

from ..formats import BLOCK, BLOCKS_OF_WORD, E8M0_NAN, STEP_ABOVE, STEP_BELOW, STEP_MOST
from ..oracle_math import E4M3_VALUES, Array, Pair, to_e4m3


def step_scales(sf: Array) -> Pair:
    """sf (..., B) -> the scale bytes of the rows (...), and of the blocks (..., B)."""
    byte = sf.astype(np.int32)
    plain = (sf != 0) & (sf != E8M0_NAN)
    number = plain.sum(-1, keepdims=True)
    in_order = np.sort(np.where(plain, byte, E8M0_NAN), -1)
    median = np.take_along_axis(in_order, np.maximum(number - 1, 0) // 2, -1)
    row = np.where(plain & (byte <= median + STEP_ABOVE), byte, 0).max(-1, keepdims=True)
    row = np.maximum(row, np.where(plain, byte, 0).max(-1, keepdims=True) - STEP_MOST)
    shared = ~plain | ((byte <= row) & (byte >= row - STEP_BELOW))
    blocks = np.where(shared, row, np.maximum(byte, row - STEP_MOST))
    return row[..., 0].astype(np.uint8), blocks.astype(np.uint8)


def _padded(x: Array, axis: int, multiple: int) -> Array:
    return np.pad(x, [(0, -x.shape[a] % multiple if a == axis % x.ndim else 0) for a in range(x.ndim)])


def blocks_apart(row_sf: Array, scales: Array) -> Array:
    """Scale bytes of rows (..., M) and blocks (..., M, B) -> apart (..., ceil(M/32), ceil(B/32)) int32, the first block
    in the lowest bit."""
    apart = _padded(_padded(scales != row_sf[..., None], -1, BLOCKS_OF_WORD), -2, BLOCK)
    *lead, m, blocks = apart.shape
    flags = apart.reshape(*lead, m // BLOCK, BLOCK, blocks // BLOCKS_OF_WORD, BLOCKS_OF_WORD).max(-3).astype(np.uint32)
    return (flags << np.arange(BLOCKS_OF_WORD, dtype=np.uint32)).sum(-1, dtype=np.uint32).view("i4")


def fold_rows_stepped(q: Array, sf: Array) -> tuple[Array, Array, Array, Array]:
    """q (..., M, K), sf (..., M, K/32) -> qf (..., M, K), row_sf (..., M), step_sf (..., K/32, M), apart."""
    row_sf, scales = step_scales(sf)
    factor = np.where(sf == E8M0_NAN, np.nan, np.ldexp(1.0, sf.astype(np.int32) - scales))
    qf = to_e4m3(E4M3_VALUES[q] * np.repeat(factor, BLOCK, axis=-1))
    return qf, row_sf, np.ascontiguousarray(np.swapaxes(scales, -1, -2)), blocks_apart(row_sf, scales)
