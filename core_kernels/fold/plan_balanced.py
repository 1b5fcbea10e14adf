"""A fold that outlier channels do not spoil: powers of two move from the weights to the rows, block by block.

    weights  sf (G, N, K/32) --balance_scales--> balanced_sf, lift (G, K/32)      q, balanced_sf --fold_rows--> weights
    rows     q, sf (M, K), lift, group_ends --fold_rows_balanced--> qf, row_sf

Channels of large activations have small weights. Folded by row, the small activations of a row vanish under its large
ones, and the small weights under the large ones, although their products count alike. A block of 32 channels of a group
therefore gets the same largest scale in the weights everywhere, and the rows of the group are divided by the same power
of two. Products do not change:

    channels      0..31    32..63   64..95              0..31    32..63   64..95
    x scales      2^14     2^0      2^1       ------>   2^0      2^0      2^1        lift: 2^14, 2^0, 2^0
    w scales      2^-14    2^0      2^0                 2^0      2^0      2^0

What a row then loses is small beside the largest product that its largest block can have. The scales in q's format are
one per row, so that every folded product takes such operands, at its full rate. A block whose weights are all zero, or
below 2^-118, has lift 0.
"""

from ..formats import BLOCK
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling, require_dtype, require_rank, require_shape
from ..quantize.plan import check_scaled, tile_whole_rows, whole_row_types
from ..tiles import next_power_of_2, tiles


def _check_balance(sf: ArrayType) -> Signature:
    require_dtype("balance_scales", "sf", sf, "uint8")
    require_rank("balance_scales", "sf", sf, 3)
    groups, _, blocks = sf.shape
    return Signature((sf, ArrayType((groups, blocks), "uint8")))


def _tile_balance(call: Call, arch: str) -> Tiling:
    groups, n, blocks = call.inputs[0].shape
    t = tiles(call.op, arch)
    return t.tiling((groups,), {"N": n}, BLOCKS=blocks, BLOCK_N=t.m, BLOCK_B=next_power_of_2(blocks))


def _check_fold(q: ArrayType, sf: ArrayType, lift: ArrayType, group_ends: ArrayType) -> Signature:
    op = "fold_rows_balanced"
    check_scaled(op, q, sf, 2)
    require_dtype(op, "lift", lift, "uint8")
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    require_shape(op, "lift", lift, (group_ends.shape[0], sf.shape[1]), "one per group and 32 of K")
    return Signature(whole_row_types(op, "q", q.shape), tokens=(q.shape[0], 1))


def _tile_fold(call: Call, arch: str) -> Tiling:
    tiling, groups = tile_whole_rows(call, arch), call.inputs[3].shape[0]
    return tiling._replace(meta={**tiling.meta, "G": groups, "BLOCK_G": next_power_of_2(groups + 1)})


balance_scales = KernelOp(
    "balance_scales",
    """Raise the scales of weights so that the largest of every block of 32 along K is the largest of its group.

    sf: (G, N, K/32) E8M0 as uint8.
    Returns balanced_sf (G, N, K/32), uint8, and lift (G, K/32), uint8: the powers of two, in octaves, that sf was
    raised by, and that `fold_rows_balanced` takes out of the rows. NaN (255) stays and sets no lift; a block without a
    scale above 0 has lift 0.

    >>> sf = xp.asarray([[[127, 113, 0], [126, 110, 0]]], dtype=xp.uint8)
    >>> balanced_sf, lift = ops.balance_scales(sf)
    >>> balanced_sf.tolist(), lift.tolist()
    ([[[127, 127, 0], [126, 124, 0]]], [[0, 14, 0]])

    Raises ValueError (shape) or TypeError (dtype).
    """,
    ("sf",),
    ("balanced_sf", "lift"),
    _check_balance,
    _tile_balance,
    "fold.kernel_balanced:balance_kernel",
)
fold_rows_balanced = KernelOp(
    "fold_rows_balanced",
    f"""`fold_rows` of rows whose weights were balanced: the scales of a row less the lift of its group.

    q: (M, K) E4M3, K a positive multiple of {BLOCK}. sf: (M, K/32) E8M0. lift: (G, K/32), from `balance_scales`. All
    uint8. group_ends: (G,) int32, where each group of rows ends: non-decreasing, up to M.
    Returns qf (M, K) E4M3 and row_sf (M,) E8M0, as uint8: row_sf is the largest difference of scale and lift, at least
    0. Rows past the last end are folded as they are. NaN as in `fold_rows`.

    >>> q, sf = xp.full((1, 64), 0x38, dtype=xp.uint8), xp.asarray([[127, 141]], dtype=xp.uint8)  # 1 and 2^14
    >>> lift, ends = xp.asarray([[0, 14]], dtype=xp.uint8), xp.asarray([1], dtype=xp.int32)
    >>> qf, row_sf = ops.fold_rows_balanced(q, sf, lift, ends)
    >>> qf[0, ::32].tolist(), row_sf.tolist()
    ([56, 56], [127])

    Raises ValueError (shape, on a CPU also the ends) or TypeError (dtype).
    """,
    ("q", "sf", "lift", "group_ends"),
    ("qf", "row_sf"),
    _check_fold,
    _tile_fold,
    "fold.kernel_balanced:fold_balanced_kernel",
)
