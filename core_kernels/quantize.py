"""MXFP8 quantization along rows, along columns, along both in one read; and dequantization.

    x (M, K) --row---> q (M, K)   sf (M, K/32)       one scale per 32 values of a row
             --col---> q (K, M)   sf (K, M/32)       one scale per 32 values of a column, written transposed
             --both--> both pairs, x read once
             --packed> [q | sf] (M, K + K/32)        one wire row per token: a dispatch is one collective
    q, sf ---dequantize--> x (M, K)

A leading dim (experts) is a batch: (G, M, K) quantizes each expert's matrix. All bytes are uint8:
E4M3 for q, E8M0 for sf. numerics.md of the design is the contract; oracle.py is its definition.
"""

from .formats import BLOCK, Rounding, packed_width
from .launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape

FLOATS = ("bfloat16", "float32")


def _check(op: str, x: ArrayType, *ranks: int) -> None:
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, *ranks)


def _row_types(x: ArrayType) -> tuple[ArrayType, ArrayType]:
    *lead, k = x.shape
    return ArrayType(x.shape, "uint8"), ArrayType((*lead, k // BLOCK), "uint8")


def _col_types(x: ArrayType) -> tuple[ArrayType, ArrayType]:
    *lead, m, k = x.shape
    return ArrayType((*lead, k, m), "uint8"), ArrayType((*lead, k, m // BLOCK), "uint8")


def _plan_row(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    _check("quantize_row", x, 2, 3)
    require_multiple("quantize_row", "x", x.shape[-1], BLOCK, "last dim")
    return Launch(out=_row_types(x), attrs=(rounding, satfinite))


def _plan_row_packed(
    x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
) -> Launch:
    _check("quantize_row_packed", x, 2)
    m, k = x.shape
    require_multiple("quantize_row_packed", "x", k, BLOCK, "last dim")
    return Launch(out=(ArrayType((m, packed_width(k)), "uint8"),), attrs=(rounding, satfinite))


def _plan_col(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    _check("quantize_col", x, 2, 3)
    require_multiple("quantize_col", "x", x.shape[-2], BLOCK, "dim -2 (the scaled one)")
    return Launch(out=_col_types(x), attrs=(rounding, satfinite))


def _plan_both(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    _check("quantize_both", x, 2, 3)
    require_multiple("quantize_both", "x", x.shape[-1], BLOCK, "last dim")
    require_multiple("quantize_both", "x", x.shape[-2], BLOCK, "dim -2")
    return Launch(out=_row_types(x) + _col_types(x), attrs=(rounding, satfinite))


def _plan_dequantize(q: ArrayType, sf: ArrayType, *, arch: str, out_dtype: str = "bfloat16") -> Launch:
    op = "dequantize"
    require_dtype(op, "q", q, "uint8")
    require_dtype(op, "sf", sf, "uint8")
    require_rank(op, "q", q, 2, 3)
    require_multiple(op, "q", q.shape[-1], BLOCK, "last dim")
    require_shape(op, "sf", sf, (*q.shape[:-1], q.shape[-1] // BLOCK), "one scale per 32 values of q's last dim")
    out = ArrayType(q.shape, out_dtype)
    require_dtype(op, "out_dtype", out, *FLOATS)
    return Launch(out=(out,), attrs=())


_ATTRS = ("rounding", "satfinite")
quantize_row = KernelOp("quantize_row", None, ("x",), ("q", "sf"), _ATTRS, _plan_row)
quantize_row_packed = KernelOp("quantize_row_packed", None, ("x",), ("packed",), _ATTRS, _plan_row_packed)
quantize_col = KernelOp("quantize_col", None, ("x",), ("q_t", "sf_t"), _ATTRS, _plan_col)
quantize_both = KernelOp("quantize_both", None, ("x",), ("q", "sf", "q_t", "sf_t"), _ATTRS, _plan_both)
dequantize = KernelOp("dequantize", None, ("q", "sf"), ("x",), (), _plan_dequantize)
