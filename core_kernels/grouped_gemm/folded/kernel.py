"""Triton kernels of the grouped products of folded operands; plan.py draws the operands.

Hopper's FP8 tensor cores accumulate with about 14 mantissa bits, so that partial sums are promoted to fp32 every 128
terms, as CUTLASS and DeepGEMM do. The epilogue applies both powers of two at once, so that 2^-127 with 2^127 loses
nothing, adds the bias in fp32 and rounds once to the output. Rows past the last end have no bias.
"""

import triton
import triton.language as tl

from ...formats import E8M0_NAN, SPAN
from ...mx_math import BLOCK_MX, e4m3_to_f32, e8m0_to_f32
from ...tokens import tokens_of
from ..exact.kernel import rows_of_tile
from ..exact.kernel_tile import load_tile, store_tile

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)
SPAN_MX: tl.constexpr = tl.constexpr(SPAN)


@triton.jit
def dot(a, b, acc, HW_CAST: tl.constexpr):
    """acc + a b^T; a and b are E4M3 bytes. The tensor core sums the terms of a call, at most 128; fp32 adds the sum."""
    if HW_CAST:
        a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
        return tl.dot(a, tl.trans(b), acc, max_num_imprecise_acc=a.shape[1])
    else:
        return tl.dot(e4m3_to_f32(a, False), tl.trans(e4m3_to_f32(b, False)), acc, input_precision="ieee")


@triton.jit
def scaled(acc, row_byte, col_byte):
    """acc * 2^(row_byte + col_byte - 254), in two factors of half the exponent: no intermediate overflow."""
    row, col = row_byte.to(tl.int32)[:, None], col_byte.to(tl.int32)[None, :]
    half = (row + col) >> 1
    value = acc * e8m0_to_f32(half) * e8m0_to_f32(row + col - half)
    return tl.where((row == NAN_BYTE) | (col == NAN_BYTE), float("nan"), value)


@triton.jit
def rescale_factor(increase):
    """2^-increase: the factor of an accumulator whose scale changes; 0 below 2^-126, and at most 2^127."""
    return (tl.minimum(tl.maximum(127 - increase, 0), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _product(
    acc, lhs_qf, rhs_qf, row, in_m, weight_row, in_n, K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_K: tl.constexpr
):
    for k0 in range(0, K, BLOCK_K):
        a = load_tile(lhs_qf, row, in_m, k0, K, K, BLOCK_K)
        b = load_tile(rhs_qf, weight_row, in_n, k0, K, K, BLOCK_K)
        acc = dot(a, b, acc, HW_CAST)
    return acc


@triton.jit
def _mm_tile(
    lhs_qf, lhs_sf, rhs_qf, rhs_sf, bias, lhs2_qf, lhs2_sf, rhs2_qf, rhs2_sf, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    HAS_BIAS: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out. K2: the contraction dim of the second product, 0 for none."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n0 = (tl.program_id(0) % n_tiles) * BLOCK_N
    rows = rows_of_tile(tl.program_id(0) // n_tiles, group_ends, M, clear_rest, G, BLOCK_G, BLOCK_M)
    group, m0, end = rows
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    in_m, in_n = m < end, n < N
    row, weight_row = m.to(tl.int64), group.to(tl.int64) * N + n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if group < G:
        acc = _product(acc, lhs_qf, rhs_qf, row, in_m, weight_row, in_n, K, HW_CAST, BLOCK_K)
        row_byte = tl.load(lhs_sf + row, mask=in_m, other=0)
        acc = scaled(acc, row_byte, tl.load(rhs_sf + weight_row, mask=in_n, other=0))
        if K2:
            more = _product(
                tl.zeros_like(acc), lhs2_qf, rhs2_qf, row, in_m, weight_row, in_n, K2, HW_CAST, BLOCK_K
            )  # fmt: skip
            row_byte = tl.load(lhs2_sf + row, mask=in_m, other=0)
            acc += scaled(more, row_byte, tl.load(rhs2_sf + weight_row, mask=in_n, other=0))
        if HAS_BIAS:
            acc += tl.load(bias + weight_row, mask=in_n, other=0.0)[None, :]
    store_tile(out, row, in_m, n0, N, N, acc, True, HW_CAST, False)


@triton.jit
def mm_kernel(
    lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _mm_tile(
        lhs_qf, lhs_sf, rhs_qf, rhs_sf, None, None, None, None, None, group_ends, M, out,
        clear_rest, G, N, K, 0, False, HW_CAST, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def mm_bias_kernel(
    lhs_qf, lhs_sf, rhs_qf, rhs_sf, bias, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _mm_tile(
        lhs_qf, lhs_sf, rhs_qf, rhs_sf, bias, None, None, None, None, group_ends, M, out,
        clear_rest, G, N, K, 0, True, HW_CAST, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def mm_sum_kernel(
    lhs_qf, lhs_sf, rhs_qf, rhs_sf, lhs2_qf, lhs2_sf, rhs2_qf, rhs2_sf, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _mm_tile(
        lhs_qf, lhs_sf, rhs_qf, rhs_sf, None, lhs2_qf, lhs2_sf, rhs2_qf, rhs2_sf, group_ends, M, out,
        clear_rest, G, N, K, K2, False, HW_CAST, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def wgrad_kernel(
    lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0)
    n = (tile // k_tiles % n_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    k0 = (tile % k_tiles) * BLOCK_K
    k = k0 + tl.arange(0, BLOCK_K)
    group = (tile // (n_tiles * k_tiles)).to(tl.int64)
    in_n, in_k = n < N, k < K

    before = tl.load(group_ends + group - 1, mask=group > 0, other=0)
    tokens = tokens_of(before, tl.load(group_ends + group), M, BLOCK_MX)
    start, end, whole = tokens
    pitch = M // BLOCK_MX * BLOCK_MX
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    slot = start // SPAN_MX + group
    # Scales of empty accumulators are ignored.
    row_byte = tl.load(lhs_sf + slot * N + n, mask=in_n & (start < end), other=0).to(tl.int32)
    col_byte = tl.load(rhs_sf + slot * K + k, mask=in_k & (start < end), other=0).to(tl.int32)
    for m0 in range(start, end, BLOCK_M):
        span = slot + (m0 - start) // SPAN_MX
        row_now = tl.load(lhs_sf + span * N + n, mask=in_n, other=0).to(tl.int32)
        col_now = tl.load(rhs_sf + span * K + k, mask=in_k, other=0).to(tl.int32)
        acc = acc * rescale_factor(row_now - row_byte)[:, None] * rescale_factor(col_now - col_byte)[None, :]
        row_byte, col_byte = row_now, col_now
        a = load_tile(lhs_qf, n.to(tl.int64), in_n, m0, end, pitch, BLOCK_M)
        b = load_tile(rhs_qf, k.to(tl.int64), in_k, m0, end, pitch, BLOCK_M)
        acc = dot(a, b, acc, HW_CAST)
    store_tile(out, group * N + n, in_n, k0, K, K, scaled(acc, row_byte, col_byte), whole, HW_CAST, False)
