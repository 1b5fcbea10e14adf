"""MXFP8 quantization along rows, along columns, along both in one read; and dequantization.

    x (M, K) --row---> q (M, K)   sf (M, K/32)       one scale per 32 values of a row
             --col---> q (K, M)   sf (K, M/32)       one scale per 32 values of a column, written transposed
             --both--> both pairs, x read once
             --packed> [q | sf] (M, K + K/32)        one wire row per token: a dispatch is one collective
    q, sf ---dequantize--> x (M, K)

A leading dim (experts) is a batch: (G, M, K) quantizes each expert's matrix. All bytes are uint8:
E4M3 for q, E8M0 for sf. oracle.py defines every one of them.

`quantize_rowwise` has one power-of-two scale per row instead, the row being the block:

              |<----------------- K ----------------->|
    x         x0  x1  x2  ...                     xK-1    bf16 or fp32
              '-------- largest magnitude ------------'--> row_sf, one E8M0 byte
    qf        x0  x1  x2  ...                     xK-1    / 2^(row_sf - 127), rounded once to E4M3

`grouped_mm_fold` multiplies such rows. `quantize_row_fold` has the same scales of finite rows, but rounds first to
the block's scale and then to the row's, and a NaN spoils only its block there: here it spoils the row.
"""

import math

from ..formats import BLOCK, Rounding, packed_width, scale_attrs
from ..launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_multiple, require_rank, require_shape
from ..tiles import cdiv, hw_cast, row_tiles, tiles
from . import kernel

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


def _rows_launch(
    op: str, arch: str, out: tuple[ArrayType, ...], attrs: dict[str, int], batch: int, m: int, k: int
) -> Launch:
    """Tiles of `batch` matrices (m, k)."""
    if arch == "cpu":
        return Launch(out, tuple(attrs.values()))
    t = tiles(op, arch, row_width=k)
    return Launch(
        out=out,
        attrs=tuple(attrs.values()),
        grid=(cdiv(m, t.m) * cdiv(k, t.k), batch),
        scalars={"M": m},
        meta={"K": k, **attrs, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m, "BLOCK_K": t.k},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


def _flat(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Scaling along rows does not care which matrix a row is of: one matrix of all rows."""
    return 1, math.prod(shape[:-1]), shape[-1]


def _batched(shape: tuple[int, ...]) -> tuple[int, int, int]:
    *lead, m, k = shape
    return math.prod(lead), m, k


def whole_rows(
    op: str,
    argument: str,
    arch: str,
    shape: tuple[int, ...],
    attrs: dict[str, int],
) -> Launch:
    """Outputs and whole-row tiles of qf with this shape, of `argument`."""
    *lead, k = shape
    if k == 0:
        allowed = f"allowed: multiples of {BLOCK} from {BLOCK}; a row without blocks has no scale"
        fail(ValueError, op, argument, "K = 0", allowed)
    out = (ArrayType(shape, "uint8"), ArrayType(tuple(lead), "uint8"))
    if arch == "cpu":
        return Launch(out, tuple(attrs.values()))
    m = math.prod(lead)
    t = row_tiles(op, arch, k)
    return Launch(
        out=out,
        attrs=tuple(attrs.values()),
        grid=(cdiv(m, t.m),),
        scalars={"M": m},
        meta={"K": k, **attrs, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m, "BLOCK_K": t.k},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


def _plan_row(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    _check("quantize_row", x, 2, 3)
    require_multiple("quantize_row", "x", x.shape[-1], BLOCK, "last dim")
    attrs = scale_attrs("quantize_row", rounding, satfinite)
    return _rows_launch("quantize_row", arch, _row_types(x), attrs, *_flat(x.shape))


def _plan_row_packed(
    x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
) -> Launch:
    _check("quantize_row_packed", x, 2)
    m, k = x.shape
    require_multiple("quantize_row_packed", "x", k, BLOCK, "last dim")
    out = (ArrayType((m, packed_width(k)), "uint8"),)
    attrs = scale_attrs("quantize_row_packed", rounding, satfinite)
    return _rows_launch("quantize_row_packed", arch, out, attrs, 1, m, k)


def _plan_col(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    _check("quantize_col", x, 2, 3)
    require_multiple("quantize_col", "x", x.shape[-2], BLOCK, "dim -2 (the scaled one)")
    attrs = scale_attrs("quantize_col", rounding, satfinite)
    return _rows_launch("quantize_col", arch, _col_types(x), attrs, *_batched(x.shape))


def _plan_both(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    _check("quantize_both", x, 2, 3)
    require_multiple("quantize_both", "x", x.shape[-1], BLOCK, "last dim")
    require_multiple("quantize_both", "x", x.shape[-2], BLOCK, "dim -2")
    out = _row_types(x) + _col_types(x)
    attrs = scale_attrs("quantize_both", rounding, satfinite)
    return _rows_launch("quantize_both", arch, out, attrs, *_batched(x.shape))


def _plan_dequantize(q: ArrayType, sf: ArrayType, *, arch: str, out_dtype: str = "bfloat16") -> Launch:
    op = "dequantize"
    require_dtype(op, "q", q, "uint8")
    require_dtype(op, "sf", sf, "uint8")
    require_rank(op, "q", q, 2, 3)
    require_multiple(op, "q", q.shape[-1], BLOCK, "last dim")
    require_shape(op, "sf", sf, (*q.shape[:-1], q.shape[-1] // BLOCK), "one scale per 32 values of q's last dim")
    out = ArrayType(q.shape, out_dtype)
    require_dtype(op, "out_dtype", out, *FLOATS)
    return _rows_launch(op, arch, (out,), {}, *_flat(q.shape))


def _plan_rowwise(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    op = "quantize_rowwise"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")  # what the products take
    return whole_rows(op, "x", arch, x.shape, scale_attrs(op, rounding, satfinite))


_ATTRS = ("rounding", "satfinite")
quantize_row = KernelOp("quantize_row", kernel.row_kernel, ("x",), ("q", "sf"), _ATTRS, _plan_row)
quantize_row_packed = KernelOp(
    "quantize_row_packed", kernel.row_packed_kernel, ("x",), ("packed",), _ATTRS, _plan_row_packed
)
quantize_col = KernelOp("quantize_col", kernel.col_kernel, ("x",), ("q_t", "sf_t"), _ATTRS, _plan_col)
quantize_both = KernelOp("quantize_both", kernel.both_kernel, ("x",), ("q", "sf", "q_t", "sf_t"), _ATTRS, _plan_both)
dequantize = KernelOp("dequantize", kernel.dequantize_kernel, ("q", "sf"), ("x",), (), _plan_dequantize)
quantize_rowwise = KernelOp("quantize_rowwise", kernel.rowwise_kernel, ("x",), ("qf", "row_sf"), _ATTRS, _plan_rowwise)
