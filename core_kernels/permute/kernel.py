"""Triton kernels of the row gathers; plan.py defines the row map. Offsets of rows have 64 bits."""

import triton
import triton.language as tl

from ..mx_math import BLOCK_MX


@triton.jit
def _gather(
    x, row_map, R, P, out, WIDTH: tl.constexpr, PITCH: tl.constexpr, TILES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One tile of out (P, WIDTH) from rows of x, which has R rows, PITCH apart. A row of out has TILES tiles."""
    tile = tl.program_id(0)
    i = (tile // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    w = (tile % TILES) * BLOCK_W + tl.arange(0, BLOCK_W)
    row = tl.load(row_map + i, mask=i < P, other=-1).to(tl.int64)
    tl.device_assert((row >= -1) & (row < R), "row_map points outside the input")
    inside = (i < P)[:, None] & (w < WIDTH)[None, :]
    real = (row >= 0) & (row < R)
    values = tl.load(x + row[:, None] * PITCH + w[None, :], mask=inside & real[:, None], other=0)
    tl.store(out + i[:, None] * WIDTH + w[None, :], values, mask=inside)


@triton.jit
def rows_kernel(
    x, row_map, R, P, out,
    WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _gather(x, row_map, R, P, out, WIDTH, WIDTH, TILES, BLOCK_M, BLOCK_K)


@triton.jit
def mx_kernel(
    packed, row_map, R, P, q, sf,
    K: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    scales: tl.constexpr = K // BLOCK_MX
    _gather(packed, row_map, R, P, q, K, K + scales, TILES, BLOCK_M, BLOCK_K)
    _gather(packed + K, row_map, R, P, sf, scales, K + scales, TILES, BLOCK_M, BLOCK_K // BLOCK_MX)
