"""Triton kernels of blockwise FP8; blockwise/plan.py draws the operands.

Quotient and reciprocal are IEEE divisions, one of each per block, so that all backends write the same bytes.
"""

import triton
import triton.language as tl

from ..formats import E4M3_MAX, SMALLEST_SCALE, SQUARE, Rounding
from ..mx_math import F32_INF, F32_NAN, e8m0_to_f32, f32_to_e4m3, scale_byte, to_f32
from ..tokens import rows_with_ends

SIDE: tl.constexpr = tl.constexpr(SQUARE)
LARGEST: tl.constexpr = tl.constexpr(E4M3_MAX)
SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SCALE)
RCEIL: tl.constexpr = tl.constexpr(int(Rounding.RCEIL))


@triton.jit
def _scale(amax, power_of_two: tl.constexpr):
    """Bits of fp32 magnitudes -> fp32 scales."""
    if power_of_two:
        scale = e8m0_to_f32(scale_byte(amax, RCEIL, False))
    else:
        scale = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full(amax.shape, LARGEST, tl.float32))
    nan = tl.full(amax.shape, F32_NAN, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(amax < F32_INF, tl.maximum(scale, SMALLEST), nan)


@triton.jit
def _magnitude(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def rows_kernel(
    x, group_ends, M, q, sf,
    K: tl.constexpr, G: tl.constexpr, power_of_two: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tiles of the rows up to the last end."""
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows = rows_with_ends(group_ends, M, G)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * k_tiles, tl.num_programs(0)):
        m0, k0 = (tile // k_tiles) * BLOCK_M, (tile % k_tiles) * BLOCK_K
        m, k = (m0 + tl.arange(0, BLOCK_M)).to(tl.int64), k0 + tl.arange(0, BLOCK_K)
        inside, at = (m < rows)[:, None] & (k < K)[None, :], m[:, None] * K + k[None, :]
        v = to_f32(tl.load(x + at, mask=inside, other=0.0))
        store_rows(v, at, inside, m, k0, rows, q, sf, K, power_of_two, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def store_rows(
    v, at, inside, m, k0, rows, q, sf,
    K: tl.constexpr, power_of_two: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of fp32 values, zeros where none exist, and store it: rows m below `rows`, columns from k0 on.

    at, inside: the offsets of its values, and which of them exist.
    """
    BLOCKS: tl.constexpr = BLOCK_K // SIDE
    scales: tl.constexpr = (K + SIDE - 1) // SIDE
    v = tl.reshape(v, (BLOCK_M, BLOCKS, SIDE))
    scale = _scale(tl.max(_magnitude(v), 2), power_of_two)
    bytes = f32_to_e4m3(v * tl.expand_dims(_inverse(scale), 2), HW_CAST)
    tl.store(q + at, tl.reshape(bytes, (BLOCK_M, BLOCK_K)), mask=inside)
    block = tl.arange(0, BLOCKS) + k0 // SIDE  # in the interpreter an int by a constexpr is a constexpr
    inside_sf = (m < rows)[:, None] & (block < scales)[None, :]
    tl.store(sf + m[:, None] * scales + block[None, :], scale, mask=inside_sf)


@triton.jit
def _quantize_square(
    x, q, sf, q_t, sf_t,
    N: tl.constexpr, K: tl.constexpr, power_of_two: tl.constexpr, HW_CAST: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Square program_id(0) of matrix program_id(1), also transposed."""
    down: tl.constexpr = (N + SIDE - 1) // SIDE
    across: tl.constexpr = (K + SIDE - 1) // SIDE
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = tile // across, tile % across
    n, k = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE)
    inside, at = (n < N)[:, None] & (k < K)[None, :], (batch * N + n)[:, None] * K + k[None, :]
    v = to_f32(tl.load(x + at, mask=inside, other=0.0))
    scale = _scale(tl.max(tl.max(_magnitude(v), 1), 0), power_of_two)
    bytes = f32_to_e4m3(v * _inverse(scale), HW_CAST)
    tl.store(q + at, bytes, mask=inside)
    tl.store(sf + (batch * down + i) * across + j, scale)
    if TRANSPOSED:
        inside, at = (k < K)[:, None] & (n < N)[None, :], (batch * K + k)[:, None] * N + n[None, :]
        tl.store(q_t + at, tl.trans(bytes), mask=inside)
        tl.store(sf_t + (batch * across + j) * down + i, scale)


@triton.jit
def squares_kernel(x, q, sf, N: tl.constexpr, K: tl.constexpr, power_of_two: tl.constexpr, HW_CAST: tl.constexpr):
    _quantize_square(x, q, sf, None, None, N, K, power_of_two, HW_CAST, False)


@triton.jit
def squares_both_kernel(
    x, q, sf, q_t, sf_t, N: tl.constexpr, K: tl.constexpr, power_of_two: tl.constexpr, HW_CAST: tl.constexpr
):
    _quantize_square(x, q, sf, q_t, sf_t, N, K, power_of_two, HW_CAST, True)
