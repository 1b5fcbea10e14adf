"""A fold that outlier channels do not spoil: a block far from its row's middle has a scale of its own.

    q (M, K), sf (M, K/32) --fold_rows_stepped--> qf (M, K), row_sf (M,), step_sf (K/32, M), apart (M/32, K/4096)

A row has a middle scale, the lower median of its first eight blocks, and its scale row_sf is five octaves above. Blocks
within five octaves of the middle have the scale of the row. Others are apart: their scale is steps of four octaves
away, in both directions alike:

    block - middle     -13 ... -10   -9 ... -6   -5 ... 5   6 ... 9   10 ... 13    octaves
    step_sf - row_sf       -8           -4          0          4          8
    octaves lost         7 to 10       7 to 10    0 to 10    0 to 3     0 to 3     of E4M3's 15 with all bits

So ordinary rows have one scale, and a product of two such operands multiplies 128 terms at a time. Where one of them
has a block apart, it multiplies those 128 terms 32 at a time, and scales what it adds. Where row and column are apart
in opposite directions, as large activations and their small weights are, the factor is 1.

A scale depends on its block and on the first eight blocks of its row alone. Zero blocks (byte 0) and NaN blocks (255)
are left out of the median, and are never apart.
"""

import math

from ..dispatch import facts
from ..formats import BLOCK, STAGE, STAGES_OF_WORD
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling
from ..quantize.plan import check_scaled, whole_row_types
from ..tiles import cdiv, tiles


def stepped_types(shape: tuple[int, ...]) -> tuple[ArrayType, ArrayType, ArrayType]:
    """Scales of rows and of blocks, and the blocks apart, of stepped rows (..., M, K).

    >>> [x.shape for x in stepped_types((2, 40, 4128))]
    [(2, 40), (2, 129, 40), (2, 2, 2)]
    """
    *lead, m, k = shape
    words = cdiv(k, STAGE * STAGES_OF_WORD)
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
    t = tiles(call.op, arch)
    grid = cdiv(m, BLOCK), math.prod(lead)
    return t.tiling(grid, {"M": m}, K=k, HW_CAST=facts(arch).hw_cast, BLOCK_K=max(t.k, STAGE))


fold_rows_stepped = KernelOp(
    "fold_rows_stepped",
    """Fold rows to one scale, and blocks far from the row's middle to one of their own: operands of
    `grouped_mm_fold_stepped`.

    q: (..., M, K) E4M3, 2 or 3 dims, K a positive multiple of 32. sf: (..., M, K/32) E8M0. Both uint8.
    Returns qf (..., M, K) E4M3, row_sf (..., M) E8M0, step_sf (..., K/32, M) E8M0, the scale of every block, all uint8,
    and apart (..., ceil(M/32), ceil(K/4096)) int32: of 32 rows a bit per 128 of K, set if step_sf of one of them is not
    its row_sf there. row_sf is the middle + 5, at most 254, and the middle the lower median of the first eight blocks,
    zero blocks (byte 0) and NaN blocks (255) left out; 0 if there are no others. With d the octaves from the middle to
    a block, its step_sf is middle + 5 + 4 n, at most 254, with the sign of d and n = ceil((|d| - 5) / 4), or 0 if |d|
    <= 5. A zero block and a NaN block have row_sf; a NaN block becomes bytes 0x7F.

    >>> q, sf = xp.full((1, 256), 0x38, dtype=xp.uint8), xp.asarray([[127] * 4 + [141] + [127] * 3], dtype=xp.uint8)
    >>> qf, row_sf, step_sf, apart = ops.fold_rows_stepped(q, sf)  # a block of 2^14
    >>> row_sf.tolist(), step_sf[:, 0].tolist(), apart.tolist()
    ([132], [132, 132, 132, 132, 144, 132, 132, 132], [[2]])
    >>> qf[0, [0, 128]].tolist()  # 2^-5 under 2^5, 2^-3 under 2^17
    [16, 32]

    Raises ValueError (shape) or TypeError (dtype).
    """,
    ("q", "sf"),
    ("qf", "row_sf", "step_sf", "apart"),
    _check,
    _tile,
    "fold.kernel_stepped:fold_stepped_kernel",
)
