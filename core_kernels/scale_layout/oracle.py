"""The definition of the blocked layout of scales in numpy. Bytes are exact."""

import numpy as np

from ..oracle_math import Array, group_slices

TILE_ROWS, TILE_SCALES = 128, 4


def _padded_row_of(group_ends: Array) -> list[int]:
    """The padded position of each row when every group is padded to 128 rows."""
    rows: list[int] = []
    start = 0
    for group in group_slices(group_ends):
        size = group.stop - group.start
        rows += range(start, start + size)
        start += -(-size // TILE_ROWS) * TILE_ROWS
    return rows


def block_scales(sf: Array, group_ends: Array) -> Array:
    """sf (M, S) -> (P, S4): groups padded to 128 rows, S to a multiple of 4, each 128 x 4 tile in 512 bytes.

    P = M + 127 * G, rounded down to 128. In a tile row r = 32 * a + b, scale c is byte 16 * b + 4 * a + c.
    Padding and the positions past the last end are 0.
    """
    m, s = sf.shape
    p = (m + (TILE_ROWS - 1) * len(group_ends)) // TILE_ROWS * TILE_ROWS
    padded = np.zeros((p, -(-s // TILE_SCALES) * TILE_SCALES), np.uint8)
    rows = _padded_row_of(group_ends)
    padded[rows, :s] = sf[: len(rows)]
    across = padded.shape[1] // TILE_SCALES
    tiles = padded.reshape(p // TILE_ROWS, 4, 32, across, TILE_SCALES)  # row tile, a, b, column tile, c
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(padded.shape)


def unblock_scales(blocked: Array, group_ends: Array, num_rows: int, num_scales: int) -> Array:
    """The inverse of block_scales: blocked (P, S4) -> sf (num_rows, num_scales); rows past the last end are zeros."""
    p, s4 = blocked.shape
    tiles = blocked.reshape(p // TILE_ROWS, s4 // TILE_SCALES, 32, 4, TILE_SCALES)
    padded = tiles.transpose(0, 3, 2, 1, 4).reshape(p, s4)
    sf = np.zeros((num_rows, num_scales), np.uint8)
    rows = _padded_row_of(group_ends)
    sf[: len(rows)] = padded[rows, :num_scales]
    return sf
