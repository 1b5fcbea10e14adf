"""Scales as Blackwell's tensor cores read them: tiles of 128 rows x 4 scales in 512 contiguous bytes.

    sf (M, S) row-major  --block_scales-->  blocked (P, S4)       S = K/32, S4 = S padded to a multiple of 4
                        <-unblock_scales--

    a tile: row r = 32 * a + b, scale c at byte 16 * b + 4 * a + c      (32 x 4 x 4; tiles lie row-major)

Each group of rows starts a tile of its own: P = M + 127 * G rounded down to 128 holds any split of M rows into G
groups. Padding is 0, and so is what lies past the last group. Source: cuBLAS, "1D block scaling factors layout".
"""

import triton
import triton.language as tl

from .launch import ArrayType, KernelOp, Launch, require_dtype, require_rank, require_shape, require_size
from .tiles import cdiv, next_power_of_2, tiles

TILE_ROWS, TILE_SCALES = 128, 4


@triton.jit
def _block_kernel(
    sf, group_ends, M, blocked,
    S: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_K tiles side by side, of row tile program_id(0)."""
    tile = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    ends = tl.load(group_ends + g, mask=g < GROUPS, other=0)
    starts = tl.load(group_ends + g - 1, mask=(g > 0) & (g < GROUPS), other=0)
    group_tiles = tl.where(g < GROUPS, (ends - starts + 127) // 128, 0)
    tile_ends = tl.cumsum(group_tiles, 0)
    mine = (tile_ends > tile) & (tile_ends - group_tiles <= tile)  # of one group, or of none: padding
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
def _unblock_kernel(
    blocked, group_ends, M, P, sf,
    S: tl.constexpr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of sf. A row moved down by the padding of the groups before it."""
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


def _blocked_shape(rows: int, scales: int, groups: int) -> tuple[int, int]:
    p = (rows + (TILE_ROWS - 1) * groups) // TILE_ROWS * TILE_ROWS
    return p, (scales + TILE_SCALES - 1) // TILE_SCALES * TILE_SCALES


def _check(op: str, argument: str, scales: ArrayType, group_ends: ArrayType) -> None:
    require_dtype(op, argument, scales, "uint8")
    require_rank(op, argument, scales, 2)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)


def _plan_block(sf: ArrayType, group_ends: ArrayType, *, arch: str) -> Launch:
    op = "block_scales"
    _check(op, "sf", sf, group_ends)
    (m, s), groups = sf.shape, group_ends.shape[0]
    p, s4 = _blocked_shape(m, s, groups)
    out = (ArrayType((p, s4), "uint8"),)
    if arch == "cpu":
        return Launch(out, ())
    t = tiles(op, arch)
    return Launch(
        out=out,
        attrs=(),
        grid=(p // TILE_ROWS, cdiv(s4 // TILE_SCALES, t.k)),
        scalars={"M": m},
        meta={"S": s, "GROUPS": groups, "BLOCK_G": next_power_of_2(groups), "BLOCK_K": t.k},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


def _plan_unblock(blocked: ArrayType, group_ends: ArrayType, *, arch: str, num_rows: int, num_scales: int) -> Launch:
    op = "unblock_scales"
    _check(op, "blocked", blocked, group_ends)
    for name, value in (("num_rows", num_rows), ("num_scales", num_scales)):
        require_size(op, name, value)
    groups = group_ends.shape[0]
    shape = _blocked_shape(num_rows, num_scales, groups)
    require_shape(op, "blocked", blocked, shape, f"what {groups} groups of {num_rows} x {num_scales} scales take")
    out = (ArrayType((num_rows, num_scales), "uint8"),)
    if arch == "cpu":
        return Launch(out, ())
    t = tiles(op, arch)
    return Launch(
        out=out,
        attrs=(),
        grid=(cdiv(num_rows, t.m), cdiv(num_scales, t.k)),
        scalars={"M": num_rows, "P": shape[0]},
        meta={
            "S": num_scales, "GROUPS": groups, "BLOCK_G": next_power_of_2(groups), "BLOCK_M": t.m, "BLOCK_K": t.k,
        },
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )  # fmt: skip


block_scales = KernelOp("block_scales", _block_kernel, ("sf", "group_ends"), ("blocked",), (), _plan_block)
unblock_scales = KernelOp("unblock_scales", _unblock_kernel, ("blocked", "group_ends"), ("sf",), (), _plan_unblock)
