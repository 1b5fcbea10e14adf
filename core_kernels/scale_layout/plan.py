"""Scales as Blackwell's tensor cores read them: tiles of 128 rows x 4 scales in 512 contiguous bytes.

    sf (M, S) row-major  --block_scales-->  blocked (P, S4)       S = K/32, S4 = S padded to a multiple of 4
                        <-unblock_scales--

    a tile: row r = 32 * a + b, scale c at byte 16 * b + 4 * a + c      (32 x 4 x 4; tiles lie row-major)

Each group of rows starts a tile of its own: P = M + 127 * G rounded down to 128 holds any split of M rows into G
groups. Padding is 0, and so is what lies past the last group. Source: cuBLAS, "1D block scaling factors layout".
"""

from ..launch import ArrayType, KernelOp, Launch, require_dtype, require_rank, require_shape, require_size
from ..tiles import cdiv, next_power_of_2, tiles
from . import kernel

TILE_ROWS, TILE_SCALES = 128, 4


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


block_scales = KernelOp("block_scales", kernel.block_kernel, ("sf", "group_ends"), ("blocked",), (), _plan_block)
unblock_scales = KernelOp(
    "unblock_scales", kernel.unblock_kernel, ("blocked", "group_ends"), ("sf",), (), _plan_unblock
)
