"""Triton kernels between the row-major and the blocked layout of scales; plan.py draws a tile."""

import triton
import triton.language as tl


@triton.jit
def block_kernel(
    sf, group_ends, M, blocked,
    S: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K neighbouring tiles of row tile program_id(0)."""
    tile = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    ends = tl.load(group_ends + g, mask=g < GROUPS, other=0)
    starts = tl.load(group_ends + g - 1, mask=(g > 0) & (g < GROUPS), other=0)
    group_tiles = tl.where(g < GROUPS, (ends - starts + 127) // 128, 0)
    tile_ends = tl.cumsum(group_tiles, 0)
    mine = (tile_ends > tile) & (tile_ends - group_tiles <= tile)  # in one group, or in none: padding
    row0 = tl.sum(tl.where(mine, starts + (tile - tile_ends + group_tiles) * 128, 0), 0)
    end = tl.minimum(tl.sum(tl.where(mine, ends, 0), 0), M)

    across: tl.constexpr = (S + 3) // 4
    j, byte = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K), tl.arange(0, 512)
    row = (row0 + byte // 4 % 4 * 32 + byte // 16)[None, :]
    scale = j[:, None] * 4 + byte[None, :] % 4
    values = tl.load(sf + row.to(tl.int64) * S + scale, mask=(row >= 0) & (row < end) & (scale < S), other=0)
    to = (tile.to(tl.int64) * across + j[:, None]) * 512 + byte[None, :]
    tl.store(blocked + to, values, mask=j[:, None] < across)


@triton.jit
def unblock_kernel(
    blocked, group_ends, M, P, sf,
    S: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of sf. The padding of earlier groups shifts a row down."""
    g = tl.arange(0, BLOCK_G)
    ends = tl.load(group_ends + g, mask=g < GROUPS, other=0)
    starts = tl.load(group_ends + g - 1, mask=(g > 0) & (g < GROUPS), other=0)
    padding = tl.where(g < GROUPS, (ends - starts + 127) // 128 * 128 - (ends - starts), 0)
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    s = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = m + tl.sum(tl.where(ends[None, :] <= m[:, None], padding[None, :], 0), 1)
    real = (m < tl.max(ends, 0)) & (row < P)

    across: tl.constexpr = (S + 3) // 4
    r = row % 128
    tile = (row // 128)[:, None] * across + (s // 4)[None, :]
    inside = (m < M)[:, None] & (s < S)[None, :]
    byte = (r % 32 * 16 + r // 32 * 4)[:, None] + (s % 4)[None, :]
    values = tl.load(blocked + tile * 512 + byte, mask=inside & real[:, None], other=0)
    tl.store(sf + m[:, None] * S + s[None, :], values, mask=inside)
