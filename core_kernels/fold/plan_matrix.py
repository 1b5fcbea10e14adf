"""Both folded operands of weights: by row, and by column.

    x (..., M, K) --quantize_matrix_fold--> qf (..., M, K), row_sf (..., M)     operand of out = y x^T
                                            qf_t (..., K, M), col_sf (..., K)   operand of dy = dout x

The scale of a row is known after the whole row, that of a column after the whole matrix. Of bf16 the CUDA kernel moves
4 bytes per value where the device holds the tiles of a matrix on the chip until all are measured, and otherwise 6: it
reads x a second time. The separate ops move 8:

    x --quantize_both--> q, sf, q_t, sf_t --fold_rows, twice--> qf, row_sf, qf_t, col_sf
    read 2              write 2            read 2               write 2

The bytes are those of the separate ops. Where the CUDA kernel does not run, and there is no C++, the op is composed of
them. That is so for fp32 on every GPU: read twice, it moves 10 bytes per value, as many as in the separate ops.
"""

import math
from collections.abc import Callable
from typing import Any

from ..formats import BLOCK, Rounding, scale_attrs
from ..launch import ArrayType, Call, KernelOp, Signature, Tiling, fail, require_dtype, require_multiple, require_rank
from ..quantize.plan import FLOATS, SCALES, quantize_both
from .plan import fold_rows

HELD_NBYTES = 8 << 20
"""The largest matrix that the CUDA kernel reads once. The 132 multiprocessors of an H100 or H200 hold 33 MB of x in
tiles: several such matrices, of which some are measured while others are written. On an H200 it is 14% faster for 3 and
6 MB than to read x twice, no faster for 12 and 15 MB, and 7% slower for 29 MB."""
TILE = 256, 128
"""Rows and columns of a tile of the CUDA kernel."""


def scratch_words(batch: int, m: int, k: int) -> int:
    """Words of the scratch memory of the CUDA kernel: the maximum of each row and column, a count of the tiles of each
    matrix, one of all, and a word of each tile.

    >>> scratch_words(2, 32, 160)
    391
    """
    tiles = -(-m // TILE[0]) * -(-k // TILE[1])
    return batch * (m + k + 1) + 1 + batch * tiles


def _check(x: ArrayType, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Signature:
    op = "quantize_matrix_fold"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2, 3)
    *lead, m, k = x.shape
    require_multiple(op, "x", k, BLOCK, "last dim")
    require_multiple(op, "x", m, BLOCK, "dim -2")
    for name, size, line in (("M", m, "column"), ("K", k, "row")):
        if size == 0:
            allowed = f"allowed: multiples of {BLOCK} from {BLOCK}; a {line} without blocks has no scale"
            fail(ValueError, op, "x", f"{name} = 0", allowed)
    shapes = (*lead, m, k), (*lead, m), (*lead, k, m), (*lead, k)
    return Signature(tuple(ArrayType(shape, "uint8") for shape in shapes), scale_attrs(op, rounding, satfinite))


def _tile(call: Call, arch: str) -> Tiling:  # one tile size on every architecture
    (x,) = call.inputs
    *lead, m, k = x.shape
    scratch = ArrayType((scratch_words(math.prod(lead), m, k),), "int32")
    unsupported = "" if x.dtype == "bfloat16" else "allowed: triton; its CUDA kernel takes bfloat16"
    return Tiling(scratch=(scratch,), cuda_attrs=(int(2 * m * k <= HELD_NBYTES),), cuda_unsupported=unsupported)


def _compose(call: Callable[..., tuple[Any, ...]], x: Any, **options: Any) -> tuple[Any, ...]:
    q, sf, q_t, sf_t = call(quantize_both, x, **options)
    return *call(fold_rows, q, sf), *call(fold_rows, q_t, sf_t)


quantize_matrix_fold = KernelOp(
    "quantize_matrix_fold",
    f"""`quantize_both`, and `fold_rows` of both results: weights with one scale per row, and per column.

    x: (..., M, K) bf16 or fp32, 2 or 3 dims, M and K positive multiples of 32.
    {SCALES}
    Returns qf (..., M, K), row_sf (..., M), qf_t (..., K, M) and col_sf (..., K), uint8.

    >>> x = xp.asarray([[4.0] * 64] + [[1.0] * 64] * 31)
    >>> qf, row_sf, qf_t, col_sf = ops.quantize_matrix_fold(x)
    >>> row_sf[:2].tolist(), col_sf[:2].tolist()  # 4 = 2^8 * 2^-6; 127 - 6 = 121
    ([121, 119], [121, 121])

    Raises ValueError (shape, rounding) or TypeError (dtype).
    """,
    ("x",),
    ("qf", "row_sf", "qf_t", "col_sf"),
    _check,
    _tile,
    compose=_compose,
)
