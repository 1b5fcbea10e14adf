"""What a fold costs a tensor: the values that become zero, and the values that lose bits.

    q (R, K), sf (R, K/32), target (R, K/32) --count_fold_loss--> nonzero (R,), rounded (R,), flushed (R,)

A fold of a block with scale byte sf to the byte `target` shifts its values down by target - sf octaves. E4M3 holds such
a value exactly until it reaches the subnormals, 2^-9 apart:

    shift     0 ........................ up to 2^-6 .............. below
    value     the same under its scale   rounded to k * 2^-9       flushed to zero

The caller chooses the target, so one kernel serves every fold: of rows, of spans of tokens (fold_groups), or one not
yet written. Sums are per row in 32 bits, since a tensor may have more values than 32 bits count; programs share no sum.
"""

import math

from ..dispatch import facts
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling, require_dtype, require_shape
from ..quantize.plan import check_scaled
from ..tiles import cdiv, tiles


def _check(q: ArrayType, sf: ArrayType, target: ArrayType) -> Signature:
    op = "count_fold_loss"
    require_dtype(op, "target", target, "uint8")
    check_scaled(op, q, sf, 2, 3)
    require_shape(op, "target", target, sf.shape, "one per scale of sf")
    return Signature((ArrayType(tuple(q.shape[:-1]), "int32"),) * 3)


def _tile(call: Call, arch: str) -> Tiling:
    *lead, k = call.inputs[0].shape
    m, t = math.prod(lead), tiles(call.op, arch, row_width=k)
    return t.tiling((cdiv(m, t.m),), {"M": m}, K=k, HW_CAST=facts(arch).hw_cast, BLOCK_M=t.m, BLOCK_K=t.k)


count_fold_loss = KernelOp(
    "count_fold_loss",
    """Per row, how many values a fold of each block to the scale byte `target` rounds and flushes to zero.

    q: (..., M, K) E4M3, 2 or 3 dims, K a multiple of 32. sf, target: (..., M, K/32) E8M0. All uint8.
    Returns nonzero, rounded and flushed (..., M) int32: values that are not zero, those of them that change in the
    subnormals of E4M3, and those that become zero. NaN and blocks whose sf or target is 255 are not counted. A target
    below the scale of a block changes nothing.

    >>> q, target = xp.full((3, 32), 0x39, dtype=xp.uint8), xp.full((3, 1), 127, dtype=xp.uint8)  # 1.125, and 2^0
    >>> sf = xp.asarray([[121], [120], [111]], dtype=xp.uint8)  # 1.125 * 2^-6 is 9 * 2^-9, one octave below 4.5 * 2^-9
    >>> [count.tolist() for count in ops.count_fold_loss(q, sf, target)]
    [[32, 32, 32], [0, 32, 0], [0, 0, 32]]

    Raises ValueError (shape) or TypeError (dtype).
    """,
    ("q", "sf", "target"),
    ("nonzero", "rounded", "flushed"),
    _check,
    _tile,
    "fold.kernel_loss:count_kernel",
)
