"""A fold that outlier channels do not spoil: the scale of a row may change from one block of 32 to the next.

    q (M, K), sf (M, K/32) --fold_rows_stepped--> qf (M, K), step_sf (K/32, M), changes (M/32, K/4096)

A row has a middle scale, the lower median of its first eight blocks. The scale of a block is five octaves above the
middle, and the same as long as the block's own scale is within five octaves of the middle. Beyond, it moves in steps of
four octaves, in both directions alike:

    block - middle     -13 ... -10   -9 ... -6   -5 ... 5   6 ... 9   10 ... 13    octaves
    step_sf - middle       -3            1           5          9         13
    octaves lost         7 to 10      7 to 10     0 to 10    0 to 3     0 to 3     of E4M3's 15 with all bits

So ordinary rows have one scale, and a product of two such operands multiplies 128 terms at a time. A row with a change
is multiplied 32 terms at a time in those 128 alone, and its sum goes on in the new unit. Where the scales of a row and
of a column move in opposite directions, as those of large activations and their small weights do, the unit stays.

A scale depends on its block and on the first eight blocks of its row alone. Zero blocks (byte 0) and NaN blocks (255)
are left out of the median, and have the scale of the middle.
"""

import math

from ..dispatch import facts
from ..formats import BLOCK, STAGE, STAGES_OF_WORD
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling
from ..quantize.plan import check_scaled, whole_row_types
from ..tiles import cdiv, tiles


def stepped_types(shape: tuple[int, ...]) -> tuple[ArrayType, ArrayType]:
    """Scales and changes of stepped rows (..., M, K).

    >>> stepped_types((2, 40, 4128))
    (ArrayType(shape=(2, 129, 40), dtype='uint8'), ArrayType(shape=(2, 2, 2), dtype='int32'))
    """
    *lead, m, k = shape
    words = cdiv(k, STAGE * STAGES_OF_WORD)
    return ArrayType((*lead, k // BLOCK, m), "uint8"), ArrayType((*lead, cdiv(m, BLOCK), words), "int32")


def _check(q: ArrayType, sf: ArrayType) -> Signature:
    op = "fold_rows_stepped"
    check_scaled(op, q, sf, 2, 3)
    qf, _ = whole_row_types(op, "q", q.shape)
    return Signature((qf, *stepped_types(q.shape)))


def _tile(call: Call, arch: str) -> Tiling:
    *lead, m, k = call.inputs[0].shape
    t = tiles(call.op, arch)
    grid = cdiv(m, BLOCK), math.prod(lead)
    return t.tiling(grid, {"M": m}, K=k, HW_CAST=facts(arch).hw_cast, BLOCK_K=max(t.k, STAGE))


fold_rows_stepped = KernelOp(
    "fold_rows_stepped",
    """Fold rows to scales that change where a block is far from the row's middle: operands of
    `grouped_mm_fold_stepped`.

    q: (..., M, K) E4M3, 2 or 3 dims, K a positive multiple of 32. sf: (..., M, K/32) E8M0. Both uint8.
    Returns qf (..., M, K) E4M3 as uint8, step_sf (..., K/32, M) E8M0 as uint8, the scale of every block, and changes
    (..., ceil(M/32), ceil(K/4096)) int32: of 32 rows a bit per 128 of K, set if one of their scales changes there, also
    from the 128 before. With d the octaves from the middle to the block, step_sf is middle + 5 if |d| <= 5, and
    otherwise middle + 5 + 4 n with the sign of d and n = ceil((|d| - 5) / 4); at most 254. A zero block (byte 0) and a
    NaN block (255) have middle + 5; a NaN block becomes bytes 0x7F. The middle is the lower median of the first eight
    blocks, those blocks left out; 0 if there are no others.

    >>> q, sf = xp.full((1, 256), 0x38, dtype=xp.uint8), xp.asarray([[127] * 4 + [141] + [127] * 3], dtype=xp.uint8)
    >>> qf, step_sf, changes = ops.fold_rows_stepped(q, sf)  # a block of 2^14
    >>> step_sf[:, 0].tolist(), changes.tolist(), qf[0, [0, 128]].tolist()  # 2^-5 under 2^5, 2^-3 under 2^17
    ([132, 132, 132, 132, 144, 132, 132, 132], [[2]], [16, 32])

    Raises ValueError (shape) or TypeError (dtype).
    """,
    ("q", "sf"),
    ("qf", "step_sf", "changes"),
    _check,
    _tile,
    "fold.kernel_stepped:fold_stepped_kernel",
)
