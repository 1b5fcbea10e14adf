"""Triton kernels of quantization and dequantization; plan.py draws the operands.

A program of `_quantize_tile` reads one tile of x once and stores it quantized along rows, columns or both. A program of
`rowwise_kernel` holds whole rows, since a row's scale needs all of the row. Several kernels only pass their arguments
on: a `@triton.jit` function has one signature.
"""

import triton
import triton.language as tl

from ..mx_math import BLOCK_MX, dequantize_blocks, f32_to_bf16, quantize_blocks, to_f32


@triton.jit
def store_quantized(
    v, m0, k0, batch, M, q, sf, q_t, sf_t,
    K: tl.constexpr, Q_PITCH: tl.constexpr, SF_PITCH: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantize the (BLOCK_M, BLOCK_K) tile at (m0, k0) of matrix `batch` along rows, columns or both, and store it.

    v is bf16 or fp32, and 0 outside the matrix. Rows of q and sf are Q_PITCH and SF_PITCH bytes apart: K and K/32, or
    the width of a packed row.
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
        width = m_blocks * BLOCK_MX  # M; this form tells the compiler the alignment of q_t's rows
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
    """Reads tile program_id(0) of matrix program_id(1) once and quantizes it."""
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
def row_kernel(
    x, M, q, sf,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _quantize_tile(
        x, M, q, sf, None, None, K, K, K // BLOCK_MX, True, False,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def row_packed_kernel(
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
def col_kernel(
    x, M, q_t, sf_t,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _quantize_tile(
        x, M, None, None, q_t, sf_t, K, 0, 0, False, True,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def both_kernel(
    x, M, q, sf, q_t, sf_t,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _quantize_tile(
        x, M, q, sf, q_t, sf_t, K, K, K // BLOCK_MX, True, True,
        rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K,
    )  # fmt: skip


@triton.jit
def dequantize_kernel(
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


@triton.jit
def rowwise_kernel(
    x, M, qf, row_sf,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, k = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    inside, at = (m < M)[:, None] & (k < K)[None, :], m[:, None] * K + k[None, :]
    v = to_f32(tl.load(x + at, mask=inside, other=0.0))
    q, sf = quantize_blocks(v, 1, rounding, satfinite, HW_CAST)
    tl.store(qf + at, q, mask=inside)
    tl.store(row_sf + m, sf, mask=m < M)
