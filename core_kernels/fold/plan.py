"""One scale per row instead of one per 32 values: what an FP8 tensor core without block scales multiplies.

    q (M, K), sf (M, K/32) --fold_rows--> qf (M, K), row_sf (M,)
    x (M, K) ------quantize_row_fold----> the same, x read once
    q (R, M), sf (R, M/32), group_ends (G,) --fold_groups--> qf (R, M), span_sf (S, R)

row_sf is the row's largest scale byte and qf = RTNE(q * 2^(sf - row_sf)). A NaN block (byte 255) has no say in
row_sf and becomes NaN elements, 0x7F: the other blocks keep their values. Only a row of NaN blocks alone has
row_sf 255. A program holds whole rows: its scale is not known before the last block.

`fold_groups` has a scale per row and span of 256 tokens of a group: the largest byte so far in the group, and one more
in its first span, so that those after it seldom raise the scale. It is written in one walk over the group, before the
group's largest byte is known, and a product rescales its sums where the scale rose.

    tokens   0 ------- 256 ------- 512 - 544 ------------ 800 - 832   group_ends = [544, 832]
    spans    | 0       | 1         | 2   | 0              | 1   |
    slot     0         1           2     3 = 544/256 + 1  4           S = spans(M, G) of them; others stay unused: 0

Columns past the last end become zeros. On a GPU, where nobody looks at ends, one that is no multiple of 32 counts as
the multiple below it, and all slots of the groups on both sides of it have scale 255, NaN. So have those of groups that
end before they begin or beyond M.
"""

from ..formats import BLOCK, Rounding, scale_attrs, spans
from ..launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from ..quantize.plan import FLOATS, whole_rows
from ..tiles import cdiv, hw_cast, tiles
from . import kernel


def _plan_fold(q: ArrayType, sf: ArrayType, *, arch: str) -> Launch:
    op = "fold_rows"
    require_dtype(op, "q", q, "uint8")
    require_dtype(op, "sf", sf, "uint8")
    require_rank(op, "q", q, 2, 3)
    require_multiple(op, "q", q.shape[-1], BLOCK, "last dim")
    require_shape(op, "sf", sf, (*q.shape[:-1], q.shape[-1] // BLOCK), "one scale per 32 values of q's last dim")
    return whole_rows(op, "q", arch, q.shape, {})


def _plan_quantize_fold(
    x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
) -> Launch:
    op = "quantize_row_fold"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")
    return whole_rows(op, "x", arch, x.shape, scale_attrs(op, rounding, satfinite))


def _plan_fold_groups(q: ArrayType, sf: ArrayType, group_ends: ArrayType, *, arch: str) -> Launch:
    op = "fold_groups"
    require_dtype(op, "q", q, "uint8")
    require_dtype(op, "sf", sf, "uint8")
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "q", q, 2)
    require_rank(op, "group_ends", group_ends, 1)
    r, m = q.shape
    require_multiple(op, "q", m, BLOCK, "last dim")
    require_shape(op, "sf", sf, (r, m // BLOCK), "one scale per 32 values of q's last dim")
    groups = group_ends.shape[0]
    out = (ArrayType(q.shape, "uint8"), ArrayType((spans(m, groups), r), "uint8"))
    if arch == "cpu":
        return Launch(out, ())
    t = tiles(op, arch)
    return Launch(
        out=out,
        attrs=(),
        grid=(cdiv(r, t.m), groups + 1),
        scalars={"R": r, "M": m},
        meta={"G": groups, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


_OUT = ("qf", "row_sf")
fold_rows = KernelOp("fold_rows", kernel.fold_kernel, ("q", "sf"), _OUT, (), _plan_fold)
quantize_row_fold = KernelOp(
    "quantize_row_fold", kernel.quantize_fold_kernel, ("x",), _OUT, ("rounding", "satfinite"), _plan_quantize_fold
)
fold_groups = KernelOp(
    "fold_groups", kernel.fold_groups_kernel, ("q", "sf", "group_ends"), ("qf", "span_sf"), (), _plan_fold_groups
)
