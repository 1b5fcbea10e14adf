"""A fold that outlier channels do not spoil: a block far from its row's scale has a scale of its own.

    q (M, K), sf (M, K/32) --fold_rows_stepped--> qf (M, K), row_sf (M,), step_sf (K/32, M), apart (M/32, K/1024)

The scale of a row is the largest of its blocks that are at most nine octaves above its median block. Blocks up to
eleven octaves below share it. Others are apart: they keep their scale and their codes, unless it is more than 44
octaves away.

    block - row_sf      ... -45   -44 ... -12   -11 ... 0   1 ... 44    octaves
    step_sf - row_sf      -44     -44 ... -12       0       1 ... 44
    octaves lost        1 or more      0         0 to 11        0       of E4M3's 15 with all bits

So ordinary rows are those of `fold_rows`, byte for byte, and so is their product, which multiplies 128 terms at a
time. A block that is apart in one of the operands it multiplies alone.

A row with a block 44 octaves above its scale has the scale 44 octaves below its largest block. A scale depends on its
row alone, and not on the order of its blocks. Zero blocks (byte 0) and NaN blocks (255) are left out, and are never
apart.
"""

import math

from ..dispatch import facts
from ..formats import BLOCK, BLOCKS_OF_WORD
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling
from ..quantize.plan import check_scaled, whole_row_types
from ..tiles import cdiv, tiles


def stepped_types(shape: tuple[int, ...]) -> tuple[ArrayType, ArrayType, ArrayType]:
    """Scales of rows and of blocks, and the blocks apart, of stepped rows (..., M, K).

    >>> [x.shape for x in stepped_types((2, 40, 4128))]
    [(2, 40), (2, 129, 40), (2, 2, 5)]
    """
    *lead, m, k = shape
    words = cdiv(k, BLOCK * BLOCKS_OF_WORD)
    return (
        ArrayType((*lead, m), "uint8"),
        ArrayType((*lead, k // BLOCK, m), "uint8"),
        ArrayType((*lead, cdiv(m, BLOCK), words), "int32"),
    )


def _check(q: ArrayType, sf: ArrayType) -> Signature:
    op = "fold_rows_stepped"
    check_scaled(op, q, sf, 2, 3)
    qf, _ = whole_row_types(op, "q", q.shape)
    return Signature((qf, *stepped_types(q.shape)))


def _tile(call: Call, arch: str) -> Tiling:
    *lead, m, k = call.inputs[0].shape
    t = tiles(call.op, arch, row_width=k)
    grid = cdiv(m, BLOCK), math.prod(lead)
    return t.tiling(grid, {"M": m}, K=k, HW_CAST=facts(arch).hw_cast, BLOCK_K=t.k)


fold_rows_stepped = KernelOp(
    "fold_rows_stepped",
    """Fold rows to one scale, and blocks far from it to one of their own: operands of `grouped_mm_fold_stepped`.

    q: (..., M, K) E4M3, 2 or 3 dims, K a positive multiple of 32. sf: (..., M, K/32) E8M0. Both uint8.
    Returns qf (..., M, K) E4M3, row_sf (..., M) E8M0, step_sf (..., K/32, M) E8M0, the scale of every block, all uint8,
    and apart (..., ceil(M/32), ceil(K/1024)) int32: of 32 rows a bit per block of K, the first in the lowest bit, set
    if step_sf of one of them is not its row_sf there. row_sf is the largest scale of a block that is at most 9 octaves
    above the lower median of the row's blocks, or 44 octaves below the largest if that is more; zero blocks (byte 0)
    and NaN blocks (255) are left out; 0 if there are no others. With d the octaves from row_sf to a block, its step_sf
    is row_sf if -11 <= d <= 0, row_sf - 44 if d < -44, and else the block's own. A zero block and a NaN block have
    row_sf; a NaN block becomes bytes 0x7F.

    >>> q, sf = xp.full((1, 256), 0x38, dtype=xp.uint8), xp.asarray([[127] * 4 + [141] + [127] * 3], dtype=xp.uint8)
    >>> qf, row_sf, step_sf, apart = ops.fold_rows_stepped(q, sf)  # a block of 2^14
    >>> row_sf.tolist(), step_sf[:, 0].tolist(), apart.tolist()
    ([127], [127, 127, 127, 127, 141, 127, 127, 127], [[16]])
    >>> qf[0, [0, 128]].tolist()  # both are 1 under their scale
    [56, 56]

    Raises ValueError (shape) or TypeError (dtype).
    """,
    ("q", "sf"),
    ("qf", "row_sf", "step_sf", "apart"),
    _check,
    _tile,
    "fold.kernel_stepped:fold_stepped_kernel",
)
