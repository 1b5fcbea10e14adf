"""A fold that outlier channels do not spoil: half of a block's distance moves from one operand to the other.

    sf (M, K/32), group_ends (G,) --span_levels--> (S, K/32) --group_levels--> level (G, K/32)
    q, sf, own level, other level, group_ends --fold_rows_balanced--> qf (M, K), row_sf (M,)

The level of a block of K is the number of octaves that its scale lies below its row's largest, in the row of the group
where that is least. A product multiplies block by block, so that a block of x may be 2^n larger and the same block of w
2^n smaller. n is half of the difference of the two levels: both are then at the mean of their levels.

    octaves, folded by row     x  -14 -14   0 -14     w    0   0 -14   0     channels 2^14 larger, their weights smaller
    n                              +7  +7  -7  +7         -7  -7  +7  -7
    balanced                   x   -7  -7  -7  -7     w   -7  -7  -7  -7

    folded by row              x  -14 -14   0 -14     w    0   0   0   0     one such channel of a block
    n                              +7  +7   0  +7         -7  -7   0  -7
    balanced                   x   -7  -7   0  -7     w   -7  -7   0  -7     7 octaves below lose nothing, 14 do

No block rises above its row's largest scale. Levels that differ by less than two move nothing: ordinary operands are
those of `fold_rows`, byte for byte. The product is the folded one. A level depends on all rows of its group.
"""

from ..dispatch import facts
from ..formats import SPAN, spans
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling, require_dtype, require_rank, require_shape
from ..quantize.plan import check_scaled, whole_row_types
from ..tiles import cdiv, next_power_of_2, row_tiles, tiles


def _check_ends(op: str, group_ends: ArrayType) -> int:
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    return group_ends.shape[0]


def _check_span_levels(sf: ArrayType, group_ends: ArrayType) -> Signature:
    op = "span_levels"
    require_dtype(op, "sf", sf, "uint8")
    require_rank(op, "sf", sf, 2)
    m, blocks = sf.shape
    out = ArrayType((spans(m, _check_ends(op, group_ends)), blocks), "uint8")
    return Signature((out,), tokens=(m, 1))


def _check_group_levels(levels: ArrayType, group_ends: ArrayType) -> Signature:
    op = "group_levels"
    require_dtype(op, "levels", levels, "uint8")
    require_rank(op, "levels", levels, 2)
    slots, blocks = levels.shape
    groups = _check_ends(op, group_ends)
    # At most as many rows as have these slots.
    return Signature((ArrayType((groups, blocks), "uint8"),), tokens=((slots - groups + 1) * SPAN - 1, 1))


def _check_fold(q: ArrayType, sf: ArrayType, own: ArrayType, other: ArrayType, group_ends: ArrayType) -> Signature:
    op = "fold_rows_balanced"
    check_scaled(op, q, sf, 2)
    groups = _check_ends(op, group_ends)
    for name, level in (("own", own), ("other", other)):
        require_dtype(op, name, level, "uint8")
        require_shape(op, name, level, (groups, sf.shape[1]), "a level per group and block of q")
    return Signature(whole_row_types(op, "q", q.shape), tokens=(q.shape[0], 1))


def _tile_span_levels(call: Call, arch: str) -> Tiling:
    (m, blocks), (groups,), t = call.inputs[0].shape, call.inputs[1].shape, tiles(call.op, arch)
    width = next_power_of_2(blocks)
    meta = {"G": groups, "GROUPS": next_power_of_2(groups), "B": blocks, "BLOCK_B": width}
    return t.tiling((spans(m, groups),), {"M": m}, **meta, BLOCK_M=max(t.m * t.k // width, 1))


def _tile_group_levels(call: Call, arch: str) -> Tiling:
    (slots, blocks), (groups,), t = call.inputs[0].shape, call.inputs[1].shape, tiles(call.op, arch)
    meta = {"B": blocks, "BLOCK_S": t.m, "BLOCK_B": t.k}
    return t.tiling((groups, cdiv(blocks, t.k)), {"S": slots}, **meta)


def _tile_fold(call: Call, arch: str) -> Tiling:
    (m, k), (groups,) = call.inputs[0].shape, call.inputs[4].shape
    t = row_tiles(call.op, arch, k)
    meta = {"K": k, "G": groups, "GROUPS": next_power_of_2(groups), "HW_CAST": facts(arch).hw_cast}
    return t.tiling((cdiv(m, t.m),), {"M": m}, **meta, BLOCK_M=t.m, BLOCK_K=t.k)


span_levels = KernelOp(
    "span_levels",
    f"""Octaves from each block's scale to its row's largest, the least of a span of {SPAN} rows of a group.

    sf: (M, B) E8M0, a scale per block of a row, uint8. group_ends: (G,) int32, where each group of rows ends.
    Returns (M // {SPAN} + G, B) uint8; group g begins at slot start // {SPAN} + g. Zero blocks (byte 0) and NaN blocks
    (255) are left out; 255 where all blocks of a span are, and in slots without a span.

    >>> sf = xp.asarray([[100, 114, 100], [90, 100, 98]], dtype=xp.uint8)
    >>> ops.span_levels(sf, xp.asarray([2], dtype=xp.int32)).tolist()
    [[10, 0, 2]]

    Raises ValueError (shape, on a CPU also the ends) or TypeError (dtype).
    """,
    ("sf", "group_ends"),
    ("levels",),
    _check_span_levels,
    _tile_span_levels,
    "fold.kernel_balanced:span_levels_kernel",
)
group_levels = KernelOp(
    "group_levels",
    f"""The least of a group's `span_levels`.

    levels: (S, B) uint8 of `span_levels`. group_ends: (G,) int32, the same.
    Returns (G, B) uint8; 0 where the group has no scale, so at most 253.

    >>> levels = xp.asarray([[10, 255], [8, 255]], dtype=xp.uint8)
    >>> ops.group_levels(levels, xp.asarray([{SPAN} + 1], dtype=xp.int32)).tolist()
    [[8, 0]]

    Raises ValueError (shape, on a CPU also the ends) or TypeError (dtype).
    """,
    ("levels", "group_ends"),
    ("level",),
    _check_group_levels,
    _tile_group_levels,
    "fold.kernel_balanced:group_levels_kernel",
)
fold_rows_balanced = KernelOp(
    "fold_rows_balanced",
    """Fold rows to one scale, each block first moved by half of the difference of two levels.

    q: (M, K) E4M3, K a positive multiple of 32. sf: (M, K/32) E8M0. own, other: (G, K/32), `group_levels` of these rows
    and of the other operand of their products. All uint8. group_ends: (G,) int32, where each group of rows ends.
    Returns qf (M, K) E4M3 and row_sf (M,) E8M0, as uint8: of `fold_rows` with every scale multiplied by
    2^((own - other) / 2), the exponent rounded towards zero. A scale above byte 254 counts as 254. row_sf is at least
    byte 0; a block with a smaller scale is folded to it. A zero block (byte 0) is not moved. Rows past the last end are
    those of `fold_rows`.

    >>> q, sf = xp.full((1, 64), 0x38, dtype=xp.uint8), xp.asarray([[127, 141]], dtype=xp.uint8)  # 1 and 2^14
    >>> own, other = xp.asarray([[14, 0]], dtype=xp.uint8), xp.asarray([[0, 14]], dtype=xp.uint8)
    >>> qf, row_sf = ops.fold_rows_balanced(q, sf, own, other, xp.asarray([1], dtype=xp.int32))
    >>> qf[0, ::32].tolist(), row_sf.tolist()
    ([56, 56], [134])

    Raises ValueError (shape, on a CPU also the ends) or TypeError (dtype). Source: the scales of SmoothQuant (Xiao et
    al., 2023), as powers of two and per block.
    """,
    ("q", "sf", "own", "other", "group_ends"),
    ("qf", "row_sf"),
    _check_fold,
    _tile_fold,
    "fold.kernel_balanced:fold_balanced_kernel",
)
