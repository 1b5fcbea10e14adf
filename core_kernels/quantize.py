"""MXFP8 quantization along rows, along columns, along both in one read; and dequantization.

    x (M, K) --row---> q (M, K)   sf (M, K/32)       one scale per 32 values of a row
             --col---> q (K, M)   sf (K, M/32)       one scale per 32 values of a column, written transposed
             --both--> both pairs, x read once
             --packed> [q | sf] (M, K + K/32)        one wire row per token: a dispatch is one collective
    q, sf ---dequantize--> x (M, K)

A leading dim (experts) is a batch: (G, M, K) quantizes each expert's matrix. All bytes are uint8:
E4M3 for q, E8M0 for sf. oracle.py defines every one of them.
"""

import math

import triton
import triton.language as tl

from .formats import BLOCK, Rounding, packed_width, scale_attrs
from .launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from .mx_math import BLOCK_MX, dequantize_blocks, f32_to_bf16, quantize_blocks, to_f32
from .tiles import cdiv, hw_cast, tiles

FLOATS = ("bfloat16", "float32")


@triton.jit
def store_quantized(
    v, m0, k0, batch, M, q, sf, q_t, sf_t,
    K: tl.constexpr, Q_PITCH: tl.constexpr, SF_PITCH: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scale the (BLOCK_M, BLOCK_K) tile at (m0, k0) of matrix `batch` along rows, columns or both, and store it.

    v is bf16 or fp32, and 0 where the tile sticks out of the matrix. Rows of q and of sf lie Q_PITCH and SF_PITCH
    bytes apart: K and K/32, or the width of a packed row.
    """
    v = to_f32(v)
    m, k = m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K)
    if ROW:
        row = batch * M + m
        blocks = tl.reshape(v, (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
        q_blocks, sf_tile = quantize_blocks(blocks, 2, rounding, satfinite, HW_CAST)
        inside = (m < M)[:, None] & (k < K)[None, :]
        tl.store(q + row[:, None] * Q_PITCH + k[None, :], tl.reshape(q_blocks, (BLOCK_M, BLOCK_K)), mask=inside)
        kb = k0 // BLOCK_MX + tl.arange(0, BLOCK_K // BLOCK_MX)
        inside_sf = (m < M)[:, None] & (kb < K // BLOCK_MX)[None, :]
        tl.store(sf + row[:, None] * SF_PITCH + kb[None, :], sf_tile, mask=inside_sf)
    if COL:
        col = batch * K + k
        blocks = tl.reshape(v, (BLOCK_M // BLOCK_MX, BLOCK_MX, BLOCK_K))
        q_blocks, sf_tile = quantize_blocks(blocks, 1, rounding, satfinite, HW_CAST)
        q_tile = tl.trans(tl.reshape(q_blocks, (BLOCK_M, BLOCK_K)))
        m_blocks = M // BLOCK_MX
        width = m_blocks * BLOCK_MX  # M, in a form that shows the compiler how rows of q_t are aligned
        tl.store(q_t + col[:, None] * width + m[None, :], q_tile, mask=(k < K)[:, None] & (m < width)[None, :])
        mb = m0 // BLOCK_MX + tl.arange(0, BLOCK_M // BLOCK_MX)
        inside_sf = (k < K)[:, None] & (mb < m_blocks)[None, :]
        tl.store(sf_t + col[:, None] * m_blocks + mb[None, :], tl.trans(sf_tile), mask=inside_sf)


@triton.jit
def _quantize_tile(
    x, M, q, sf, q_t, sf_t,
    K: tl.constexpr, Q_PITCH: tl.constexpr, SF_PITCH: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile program_id(0) of matrix program_id(1), read once."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    m0, k0 = (tile // k_tiles).to(tl.int64) * BLOCK_M, (tile % k_tiles) * BLOCK_K
    m, k = m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    v = tl.load(x + (batch * M + m)[:, None] * K + k[None, :], mask=inside, other=0.0)
    store_quantized(
        v, m0, k0, batch, M, q, sf, q_t, sf_t, K, Q_PITCH, SF_PITCH, ROW, COL,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _row_kernel(
    x, M, q, sf,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _quantize_tile(
        x, M, q, sf, None, None, K, K, K // BLOCK_MX, True, False,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _row_packed_kernel(
    x, M, packed,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pitch: tl.constexpr = K + K // BLOCK_MX
    _quantize_tile(
        x, M, packed, packed + K, None, None, K, pitch, pitch, True, False,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _col_kernel(
    x, M, q_t, sf_t,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _quantize_tile(
        x, M, None, None, q_t, sf_t, K, 0, 0, False, True,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _both_kernel(
    x, M, q, sf, q_t, sf_t,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _quantize_tile(
        x, M, q, sf, q_t, sf_t, K, K, K // BLOCK_MX, True, True,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    q, sf, M, x,
    K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    m = (tile // k_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k0 = (tile % k_tiles) * BLOCK_K
    k, kb = k0 + tl.arange(0, BLOCK_K), k0 // BLOCK_MX + tl.arange(0, BLOCK_K // BLOCK_MX)
    inside = (m < M)[:, None] & (k < K)[None, :]
    inside_sf = (m < M)[:, None] & (kb < K // BLOCK_MX)[None, :]
    q_tile = tl.load(q + m[:, None] * K + k[None, :], mask=inside, other=0)
    sf_tile = tl.load(sf + m[:, None] * (K // BLOCK_MX) + kb[None, :], mask=inside_sf, other=0)
    v = dequantize_blocks(tl.reshape(q_tile, (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX)), sf_tile, HW_CAST)
    v = tl.reshape(v, (BLOCK_M, BLOCK_K))
    if x.dtype.element_ty == tl.bfloat16:
        v = f32_to_bf16(v, HW_CAST)
    tl.store(x + m[:, None] * K + k[None, :], v, mask=inside)


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


_ATTRS = ("rounding", "satfinite")
quantize_row = KernelOp("quantize_row", _row_kernel, ("x",), ("q", "sf"), _ATTRS, _plan_row)
quantize_row_packed = KernelOp("quantize_row_packed", _row_packed_kernel, ("x",), ("packed",), _ATTRS, _plan_row_packed)
quantize_col = KernelOp("quantize_col", _col_kernel, ("x",), ("q_t", "sf_t"), _ATTRS, _plan_col)
quantize_both = KernelOp("quantize_both", _both_kernel, ("x",), ("q", "sf", "q_t", "sf_t"), _ATTRS, _plan_both)
dequantize = KernelOp("dequantize", _dequantize_kernel, ("q", "sf"), ("x",), (), _plan_dequantize)
