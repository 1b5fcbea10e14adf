"""Triton kernels of quantization and dequantization; plan.py draws the operands.

A program of `row_kernel`, `row_packed_kernel` and `col_kernel` reads one tile of x and quantizes it. A program of
`rowwise_kernel` holds whole rows, since a row's scale needs all of the row, and loops over the rows up to the last end.
"""

import triton
import triton.language as tl

from ..mx_math import BLOCK_MX, dequantize_blocks, f32_to_bf16, quantize_blocks, to_f32
from ..tokens import rows_with_ends


@triton.jit
def _read_tile(x, M, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile program_id(0) of matrix program_id(1), 0 outside the matrix; the matrix, and the tile's first row and
    column."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    m0, k0 = (tile // k_tiles).to(tl.int64) * BLOCK_M, (tile % k_tiles) * BLOCK_K
    m, k = m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K)
    inside = (m < M)[:, None] & (k < K)[None, :]
    v = tl.load(x + (batch * M + m)[:, None] * K + k[None, :], mask=inside, other=0.0)
    return to_f32(v), batch, m0, k0


@triton.jit
def _quantize_rows(
    x, M, q, sf,
    K: tl.constexpr, Q_PITCH: tl.constexpr, SF_PITCH: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of q and sf are Q_PITCH and SF_PITCH bytes apart: K and K/32, or the width of a packed row."""
    tile = _read_tile(x, M, K, BLOCK_M, BLOCK_K)
    v, batch, m0, k0 = tile
    m, k = m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K)
    row = batch * M + m
    blocks = tl.reshape(v, (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
    q_blocks, sf_tile = quantize_blocks(blocks, 2, rounding, satfinite, HW_CAST)
    inside = (m < M)[:, None] & (k < K)[None, :]
    tl.store(q + row[:, None] * Q_PITCH + k[None, :], tl.reshape(q_blocks, (BLOCK_M, BLOCK_K)), mask=inside)
    kb = k0 // BLOCK_MX + tl.arange(0, BLOCK_K // BLOCK_MX)
    inside_sf = (m < M)[:, None] & (kb < K // BLOCK_MX)[None, :]
    tl.store(sf + row[:, None] * SF_PITCH + kb[None, :], sf_tile, mask=inside_sf)


@triton.jit
def row_kernel(
    x, M, q, sf,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _quantize_rows(x, M, q, sf, K, K, K // BLOCK_MX, rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def row_packed_kernel(
    x, M, packed,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pitch: tl.constexpr = K + K // BLOCK_MX
    _quantize_rows(x, M, packed, packed + K, K, pitch, pitch, rounding, satfinite, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def col_kernel(
    x, M, q_t, sf_t,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = _read_tile(x, M, K, BLOCK_M, BLOCK_K)
    v, batch, m0, k0 = tile
    m, k = m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K)
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
    x, group_ends, M, qf, row_sf,
    K: tl.constexpr, G: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k, rows = tl.arange(0, BLOCK_K), rows_with_ends(group_ends, M, G)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        m = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside, at = (m < rows)[:, None] & (k < K)[None, :], m[:, None] * K + k[None, :]
        v = to_f32(tl.load(x + at, mask=inside, other=0.0))
        q, sf = quantize_blocks(v, 1, rounding, satfinite, HW_CAST)
        tl.store(qf + at, q, mask=inside)
        tl.store(row_sf + m, sf, mask=m < rows)
