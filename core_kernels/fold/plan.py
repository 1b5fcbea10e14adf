"""One scale per row instead of one per 32 values: the operand of FP8 tensor cores without block scales.

    q (M, K), sf (M, K/32) --fold_rows--> qf (M, K), row_sf (M,)
    x (M, K) ------quantize_row_fold----> the same, x read once
    q (R, M), sf (R, M/32), group_ends (G,) --fold_groups--> qf (R, M), span_sf (S, R)

row_sf is the largest scale byte of the row and qf = RTNE(q * 2^(sf - row_sf)). A NaN block (byte 255) is ignored when
row_sf is chosen and becomes NaN elements, 0x7F; the other blocks keep their values. row_sf is 255 only for a row of NaN
blocks alone.

With a headroom a kernel that has read a row's first 256 values nearly always knows row_sf, and writes codes under it:
the largest scale of their blocks times 2^headroom. If another block has a larger scale, the row is folded once more, to
the larger scale. Weights and SwiGLU's gradients have a headroom of 2, a factor of 4.

`fold_groups` has a scale per row and span of 256 tokens of a group: the largest byte so far in the group. In the first
span it is 3 larger, a factor of 8, so that later spans seldom raise the scale. It is written in one pass over the
group, before the largest byte of the group is known. A GEMM rescales its accumulator where the scale increases.

    tokens   0 ------- 256 ------- 512 - 544 ------------ 800 - 832   group_ends = [544, 832]
    spans    | 0       | 1         | 2   | 0              | 1   |
    slot     0         1           2     3 = 544/256 + 1  4           S = spans(M, G) slots; unused slots are 0

Columns past the last end are unspecified: nothing reads or writes them. On a GPU the host does not check ends: an end
that is no multiple of 32 counts as the multiple below it, and all slots of the groups on both sides of it have scale
255, NaN. So have the slots of groups that end before they begin or beyond M.
"""

from ..dispatch import facts
from ..formats import BLOCK, Rounding, headroom_attrs, scale_attrs, spans
from ..launch import (
    NO_ENDS,
    ROWS_UP_TO,
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    check_optional_ends,
    require_dtype,
    require_multiple,
    require_rank,
)
from ..quantize.plan import FLOATS, SCALES, check_scaled, tile_whole_rows, whole_row_types
from ..tiles import cdiv, tiles

HEADROOM = """headroom: 0 to 7; blocks are folded to the largest scale of the row's first 256 values times
            2^headroom. If another block has a larger scale, they are folded again, to this scale. 0: once, to the row's
            largest."""


def _check_fold(q: ArrayType, sf: ArrayType, group_ends: ArrayType = NO_ENDS, *, headroom: int = 0) -> Signature:
    op = "fold_rows"
    check_scaled(op, q, sf, 2, 3)
    tokens = check_optional_ends(op, group_ends, q.shape)
    return Signature(whole_row_types(op, "q", q.shape), headroom_attrs(op, headroom), tokens)


def _check_quantize_fold(
    x: ArrayType, group_ends: ArrayType = NO_ENDS, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False,
    headroom: int = 0,
) -> Signature:  # fmt: skip
    op = "quantize_row_fold"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")
    attrs = {**scale_attrs(op, rounding, satfinite), **headroom_attrs(op, headroom)}
    return Signature(whole_row_types(op, "x", x.shape), attrs, check_optional_ends(op, group_ends, x.shape))


def _check_fold_groups(q: ArrayType, sf: ArrayType, group_ends: ArrayType) -> Signature:
    op = "fold_groups"
    check_scaled(op, q, sf, 2)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    r, m = q.shape
    out = (ArrayType(q.shape, "uint8"), ArrayType((spans(m, group_ends.shape[0]), r), "uint8"))
    return Signature(out, tokens=(m, BLOCK))


def _tile_fold_groups(call: Call, arch: str) -> Tiling:
    q, _, group_ends = call.inputs
    (r, m), groups, t = q.shape, group_ends.shape[0], tiles(call.op, arch)
    scalars = {"R": r, "M": m}
    return t.tiling((cdiv(r, t.m), groups + 1), scalars, G=groups, HW_CAST=facts(arch).hw_cast, BLOCK_M=t.m)


fold_rows = KernelOp(
    "fold_rows",
    f"""Align the scales of a row to the largest of them: one scale per row.

    Args:
        q: (..., M, K) E4M3, 2 or 3 dims, K a positive multiple of 32.
        sf: (..., M, K/32) E8M0. Both uint8.
        {ROWS_UP_TO}
        {HEADROOM}

    Returns:
        qf (..., M, K) E4M3 and row_sf (..., M) E8M0, as uint8. Values of blocks with smaller scales lose the bits that
        fall below the subnormals of E4M3. A NaN block (scale byte 255) is ignored when row_sf is chosen and becomes
        bytes 0x7F; a row of NaN blocks alone has row_sf 255.

    Raises:
        ValueError: shape, headroom.
        TypeError: dtype.

    Example:
        >>> q, sf = xp.full((1, 64), 0x38, dtype=xp.uint8), xp.asarray([[127, 128]], dtype=xp.uint8)  # 1 and 2
        >>> qf, row_sf = ops.fold_rows(q, sf)
        >>> qf[0, ::32].tolist(), row_sf.tolist()  # 0.5 and 1 under 2^1
        ([48, 56], [128])
    """,
    ("q", "sf", "group_ends"),
    ("qf", "row_sf"),
    _check_fold,
    tile_whole_rows,
    "fold.kernel:fold_kernel",
    optional_ends=True,
)
quantize_row_fold = KernelOp(
    "quantize_row_fold",
    f"""`quantize_row` and `fold_rows` in one read of x.

    Args:
        x: (..., M, K) bf16 or fp32, 2 or 3 dims, K a positive multiple of 32.
        {ROWS_UP_TO}
        {SCALES}
        {HEADROOM}

    Returns:
        qf (..., M, K) E4M3 and row_sf (..., M) E8M0, as uint8.

    Raises:
        ValueError: shape, rounding, headroom.
        TypeError: dtype.

    Example:
        >>> qf, row_sf = ops.quantize_row_fold(xp.asarray([[2.0] * 32 + [1.0] * 32]))
        >>> qf[0, ::32].tolist(), row_sf.tolist()
        ([120, 112], [120])
    """,
    ("x", "group_ends"),
    ("qf", "row_sf"),
    _check_quantize_fold,
    tile_whole_rows,
    "fold.kernel:quantize_fold_kernel",
    optional_ends=True,
)
fold_groups = KernelOp(
    "fold_groups",
    """Align the scales along the tokens: one scale per row and span of 256 tokens of a group, for `grouped_wgrad_fold`.

    Args:
        q: (R, M) E4M3.
        sf: (R, M/32) E8M0. Both uint8; M, the tokens, is a multiple of 32.
        group_ends: (G,) int32, where each group ends along M: non-decreasing multiples of 32.

    Returns:
        qf (R, M) E4M3 and span_sf (M // 256 + G, R) E8M0, as uint8. A scale is the largest so far in the group, times 8
        in its first span; group g begins at slot start // 256 + g. Unused slots are 0. Columns of qf past the last end
        are unspecified.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> q, sf = xp.full((1, 512), 0x70, dtype=xp.uint8), xp.asarray([[100] * 8 + [104] * 8], dtype=xp.uint8)
        >>> qf, span_sf = ops.fold_groups(q, sf, xp.asarray([512], dtype=xp.int32))
        >>> span_sf[:, 0].tolist(), qf[0, ::256].tolist()  # 128 becomes 16 under 2^3, and stays 128
        ([103, 104, 0], [88, 112])
    """,
    ("q", "sf", "group_ends"),
    ("qf", "span_sf"),
    _check_fold_groups,
    _tile_fold_groups,
    "fold.kernel:fold_groups_kernel",
)
