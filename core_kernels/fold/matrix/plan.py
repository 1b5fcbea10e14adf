"""The folded operands of weights: by row and by column, or by column alone.

    x (..., M, K) --quantize_matrix_fold----> qf (..., M, K), row_sf (..., M)     operand of out = y x^T
                                              qf_t (..., K, M), col_sf (..., K)   operand of dy = dout x
                  --quantize_matrix_fold_t--> qf_t, col_sf

The scale of a row is known after the whole row, the scale of a column after the whole matrix. With the headroom of
weights the first 256 values of a row or of a column nearly always decide it. The CUDA kernel therefore reads x once,
moves 4 bytes per value, and rewrites the few rows and columns with a larger block elsewhere. The separate ops move 8:

    x --quantize_both--> q, sf, q_t, sf_t --fold_rows, twice--> qf, row_sf, qf_t, col_sf
    read 2              write 2            read 2               write 2

By column alone the kernel moves 3 bytes per value, `quantize_col` and `fold_rows` 5. `quantize_row_fold` is the op for
rows alone.

Results are bitwise equal to the separate ops. Where the CUDA kernel does not run, and there is no C++, the op is
composed of them. That is so for fp32 on every GPU.
"""

import math
from collections.abc import Callable
from typing import Any

from ...formats import BLOCK, WEIGHT_HEADROOM, Rounding, scale_attrs
from ...launch import ArrayType, Call, KernelOp, Signature, Tiling, fail, require_dtype, require_multiple, require_rank
from ...quantize.plan import FLOATS, SCALES, quantize_both, quantize_col
from ..plan import fold_rows


def scratch_words(batch: int, lines: int) -> int:
    """Words of the scratch memory of the CUDA kernel: two of each row or column, for the largest block of its first
    256 values, and for a larger one beyond.

    >>> scratch_words(2, 32 + 160)
    768
    """
    return 2 * batch * lines


def _operands(op: str, x: ArrayType) -> tuple[ArrayType, ...]:
    """qf, row_sf, qf_t, col_sf of x; raises unless x is a stack of matrices of whole blocks."""
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
    return tuple(ArrayType(shape, "uint8") for shape in shapes)


def _check(x: ArrayType, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Signature:
    op = "quantize_matrix_fold"
    return Signature(_operands(op, x), scale_attrs(op, rounding, satfinite))


def _check_t(x: ArrayType, *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Signature:
    op = "quantize_matrix_fold_t"
    return Signature(_operands(op, x)[2:], scale_attrs(op, rounding, satfinite))


def _tile(call: Call, arch: str) -> Tiling:  # one tile size on every architecture
    (x,) = call.inputs
    *lead, m, k = x.shape
    lines = k if call.op == "quantize_matrix_fold_t" else m + k
    scratch = ArrayType((scratch_words(math.prod(lead), lines),), "int32")
    unsupported = "" if x.dtype == "bfloat16" else "allowed: triton; its CUDA kernel takes bfloat16"
    return Tiling(scratch=(scratch,), cuda_unsupported=unsupported)


def _compose(call: Callable[..., tuple[Any, ...]], x: Any, **options: Any) -> tuple[Any, ...]:
    q, sf, q_t, sf_t = call(quantize_both, x, **options)
    rows = call(fold_rows, q, sf, headroom=WEIGHT_HEADROOM)
    return *rows, *call(fold_rows, q_t, sf_t, headroom=WEIGHT_HEADROOM)


def _compose_t(call: Callable[..., tuple[Any, ...]], x: Any, **options: Any) -> tuple[Any, ...]:
    return call(fold_rows, *call(quantize_col, x, **options), headroom=WEIGHT_HEADROOM)


quantize_matrix_fold = KernelOp(
    "quantize_matrix_fold",
    f"""`quantize_both`, and `fold_rows` of both results with headroom 2: weights with one scale per row, and per
    column.

    Args:
        x: (..., M, K) bf16 or fp32, 2 or 3 dims, M and K positive multiples of 32.
        {SCALES}

    Returns:
        qf (..., M, K), row_sf (..., M), qf_t (..., K, M) and col_sf (..., K), uint8.

    Raises:
        ValueError: shape, rounding.
        TypeError: dtype.

    Example:
        >>> x = xp.asarray([[4.0] * 64] + [[1.0] * 64] * 31)
        >>> qf, row_sf, qf_t, col_sf = ops.quantize_matrix_fold(x)
        >>> row_sf[:2].tolist(), col_sf[:2].tolist()  # 4 = 2^8 * 2^-6; 127 - 6 + 2 = 123
        ([123, 121], [123, 123])
    """,
    ("x",),
    ("qf", "row_sf", "qf_t", "col_sf"),
    _check,
    _tile,
    compose=_compose,
)
quantize_matrix_fold_t = KernelOp(
    "quantize_matrix_fold_t",
    f"""`quantize_col`, and `fold_rows` of its result with headroom 2: the transposed outputs of `quantize_matrix_fold`.

    Args:
        x: (..., M, K) bf16 or fp32, 2 or 3 dims, M and K positive multiples of 32.
        {SCALES}

    Returns:
        qf_t (..., K, M) and col_sf (..., K), uint8.

    Raises:
        ValueError: shape, rounding.
        TypeError: dtype.

    Example:
        >>> qf_t, col_sf = ops.quantize_matrix_fold_t(xp.asarray([[4.0, 1.0] * 32] * 32))
        >>> qf_t[:2, 0].tolist(), col_sf[:2].tolist()  # 2^6 under 2^-4, 2^6 under 2^-6
        ([104, 104], [123, 121])
    """,
    ("x",),
    ("qf_t", "col_sf"),
    _check_t,
    _tile,
    compose=_compose_t,
)
