"""Scales in the layout of Blackwell's tensor cores: tiles of 128 rows x 4 scales in 512 contiguous bytes.

    sf (M, S) row-major  --block_scales-->  blocked (P, S4)       S = K/32, S4 = S padded to a multiple of 4
                        <-unblock_scales--

    a tile: row r = 32 * a + b, scale c at byte 16 * b + 4 * a + c      (32 x 4 x 4; tiles in row-major order)

Each group of rows starts a new tile: P = M + 127 * G rounded down to 128 holds any split of M rows into G groups.
Padding and tiles past the last group are 0. Source: cuBLAS, "1D block scaling factors layout".
"""

from ..launch import (
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    require_dtype,
    require_rank,
    require_shape,
    require_size,
)
from ..tiles import cdiv, next_power_of_2, tiles

TILE_ROWS, TILE_SCALES = 128, 4


def _blocked_shape(rows: int, scales: int, groups: int) -> tuple[int, int]:
    p = (rows + (TILE_ROWS - 1) * groups) // TILE_ROWS * TILE_ROWS
    return p, (scales + TILE_SCALES - 1) // TILE_SCALES * TILE_SCALES


def _check_arrays(op: str, argument: str, scales: ArrayType, group_ends: ArrayType) -> None:
    require_dtype(op, argument, scales, "uint8")
    require_rank(op, argument, scales, 2)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)


def _check_block(sf: ArrayType, group_ends: ArrayType) -> Signature:
    _check_arrays("block_scales", "sf", sf, group_ends)
    m, s = sf.shape
    return Signature((ArrayType(_blocked_shape(m, s, group_ends.shape[0]), "uint8"),), tokens=(m, 1))


def _tile_block(call: Call, arch: str) -> Tiling:
    (m, s), (groups,), (p, s4) = call.inputs[0].shape, call.inputs[1].shape, call.out[0].shape
    t = tiles(call.op, arch)
    grid = p // TILE_ROWS, cdiv(s4 // TILE_SCALES, t.k)
    return t.tiling(grid, {"M": m}, S=s, GROUPS=groups, BLOCK_G=next_power_of_2(groups), BLOCK_K=t.k)


def _check_unblock(blocked: ArrayType, group_ends: ArrayType, *, num_rows: int, num_scales: int) -> Signature:
    op = "unblock_scales"
    _check_arrays(op, "blocked", blocked, group_ends)
    for name, value in (("num_rows", num_rows), ("num_scales", num_scales)):
        require_size(op, name, value)
    groups = group_ends.shape[0]
    shape = _blocked_shape(num_rows, num_scales, groups)
    require_shape(op, "blocked", blocked, shape, f"the layout of {num_rows} x {num_scales} scales in {groups} groups")
    return Signature((ArrayType((num_rows, num_scales), "uint8"),), tokens=(num_rows, 1))


def _tile_unblock(call: Call, arch: str) -> Tiling:
    (p, _), (groups,), (m, s) = call.inputs[0].shape, call.inputs[1].shape, call.out[0].shape
    t = tiles(call.op, arch)
    blocks = {"BLOCK_G": next_power_of_2(groups), "BLOCK_M": t.m, "BLOCK_K": t.k}
    return t.tiling((cdiv(m, t.m), cdiv(s, t.k)), {"M": m, "P": p}, S=s, GROUPS=groups, **blocks)


block_scales = KernelOp(
    "block_scales",
    """Row-major scales to the 128 x 4 tiles of Blackwell's tensor cores.

    Args:
        sf: (M, S) uint8.
        group_ends: (G,) int32, where each group ends along M: non-decreasing, up to M.

    Returns:
        blocked (P, S4) uint8: P = M + 127 * G rounded down to 128, S4 = S rounded up to 4. Every group starts a new
        tile; padding is 0. Row r = 32 * a + b and scale c of a tile are byte 16 * b + 4 * a + c of its 512. For
        products of other libraries, which take scales in this layout. No function of mxep calls this op.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> sf = xp.full((128, 4), 127, dtype=xp.uint8)
        >>> tuple(ops.block_scales(sf, xp.asarray([128], dtype=xp.int32)).shape)
        (128, 4)

    Source:
        CuBLAS, "1D block scaling factors layout".
    """,
    ("sf", "group_ends"),
    ("blocked",),
    _check_block,
    _tile_block,
    "scale_layout.kernel:block_kernel",
)
unblock_scales = KernelOp(
    "unblock_scales",
    """The inverse of `block_scales`.

    Args:
        blocked: (P, S4) uint8.
        group_ends: (G,) int32, as for `block_scales`.
        num_rows: M and S.
        num_scales: M and S.

    Returns:
        sf (num_rows, num_scales) uint8; rows past the last end are zeros. For operands that other libraries quantized.
        No function of mxep calls this op.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> sf, ends = xp.asarray([[3, 4]], dtype=xp.uint8), xp.asarray([1], dtype=xp.int32)
        >>> ops.unblock_scales(ops.block_scales(sf, ends), ends, num_rows=1, num_scales=2).tolist()
        [[3, 4]]
    """,
    ("blocked", "group_ends"),
    ("sf",),
    _check_unblock,
    _tile_unblock,
    "scale_layout.kernel:unblock_kernel",
)
