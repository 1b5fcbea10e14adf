"""Triton kernels of the grouped products of MXFP8 and bf16 operands; plan.py draws the operands.

Sums are fp32. sm_90 multiplies bf16 values (mx_math.dequantize_operand states their range), sm_100 multiplies E4M3 with
its scales (kernel_tile.dot_mx). On sm_90 the products of bf16 operands run in CUDA C++; both frontends therefore
dequantize before their products there.
"""

import triton
import triton.language as tl

from ...mx_math import BLOCK_MX
from ...tokens import tokens_of
from .kernel_tile import dot_bf16, dot_mx, e4m3_pointer, load_scales, load_tile, store_tile


@triton.jit
def rows_of_tile(
    tile, group_ends, M, clear_rest: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Group of a tile, first row of the tile, and end of the group. A tile has rows of one group only. Ends outside the
    rows break the contract, and count as the nearest row.

    The rows past the last end are group G, which has tiles if they are cleared.

    M            | group 0          | group 1 | group 2 (empty) | past the end |
    tiles of M   | 0      | 1   |     2    |                    | 3      | 4   |   5: nothing left
    """
    g = tl.arange(0, BLOCK_G)
    starts = tl.minimum(tl.maximum(tl.load(group_ends + g - 1, mask=(g > 0) & (g <= G), other=0), 0), M)
    ends = tl.minimum(tl.maximum(tl.load(group_ends + g, mask=g < G, other=M), 0), M)
    tiles_of = tl.where(g < G + clear_rest, tl.cdiv(tl.maximum(ends - starts, 0), BLOCK_M), 0)
    tiles_end = tl.cumsum(tiles_of, 0)
    group = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    end = tl.sum(tl.where(g == group, ends, 0), 0)
    m0 = tl.sum(tl.where(g == group, starts + (tile - tiles_end + tiles_of) * BLOCK_M, 0), 0)
    return group, m0, end


@triton.jit
def _m_grouped_tile(
    lhs, lhs_sf, rhs, rhs_sf, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, MX: tl.constexpr,
    HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n0 = (tl.program_id(0) % n_tiles) * BLOCK_N
    rows = rows_of_tile(tl.program_id(0) // n_tiles, group_ends, M, clear_rest, G, BLOCK_G, BLOCK_M)
    group, m0, end = rows
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    in_m, in_n = m < end, n < N
    row = m.to(tl.int64)
    weight_row = group.to(tl.int64) * N + n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, tl.where(group < G, K, 0), BLOCK_K):
        if MX:
            a = load_tile(e4m3_pointer(lhs, TCGEN05), row, in_m, k0, K, K, BLOCK_K)
            a_sf = load_scales(lhs_sf, 0, m0, end, k0, K, K, TCGEN05, BLOCK_M, BLOCK_K)
            b = load_tile(e4m3_pointer(rhs, TCGEN05), weight_row, in_n, k0, K, K, BLOCK_K)
            b_sf = load_scales(rhs_sf, group.to(tl.int64) * N, n0, N, k0, K, K, TCGEN05, BLOCK_N, BLOCK_K)
            acc = dot_mx(a, a_sf, b, b_sf, acc, k0, HW_CAST, TCGEN05)
        else:
            a = load_tile(lhs, row, in_m, k0, K, K, BLOCK_K)
            b = load_tile(rhs, weight_row, in_n, k0, K, K, BLOCK_K)
            acc = dot_bf16(a, tl.trans(b), acc, k0, HW_CAST, TCGEN05)
    store_tile(out, row, in_m, n0, N, N, acc, True, HW_CAST, TCGEN05)


@triton.jit
def _k_grouped_tile(
    lhs, lhs_sf, rhs, rhs_sf, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, MX: tl.constexpr, TOKENS_LAST: tl.constexpr,
    HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one group's weight gradient.

    TOKENS_LAST, implied by MX: operands are (N, M) and (K, M). Otherwise they are (M, N) and (M, K).
    """
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0)
    k0, n0 = (tile % k_tiles) * BLOCK_K, (tile // k_tiles % n_tiles) * BLOCK_N
    group = tile // (n_tiles * k_tiles)
    n, k = n0 + tl.arange(0, BLOCK_N), k0 + tl.arange(0, BLOCK_K)
    in_n, in_k = n < N, k < K
    row = n.to(tl.int64)

    before = tl.load(group_ends + group - 1, mask=group > 0, other=0)
    tokens = tokens_of(before, tl.load(group_ends + group), M, BLOCK_MX if MX else 1)  # 32 tokens share a scale
    start, end, whole = tokens
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if MX:
        pitch = M // BLOCK_MX * BLOCK_MX
        # A group's first scale has any alignment, and asynchronous copies to shared memory need 4 bytes: TCGEN05
        # loads the next step's scales into registers during a product.
        AHEAD: tl.constexpr = BLOCK_M if TCGEN05 else 0
        if TCGEN05:
            a_next = load_scales(lhs_sf, 0, n0, N, start, end, pitch, False, BLOCK_N, BLOCK_M)
            b_next = load_scales(rhs_sf, 0, k0, K, start, end, pitch, False, BLOCK_K, BLOCK_M)
        for m0 in range(start, end, BLOCK_M):
            a = load_tile(e4m3_pointer(lhs, TCGEN05), row, in_n, m0, end, pitch, BLOCK_M)
            a_sf = load_scales(lhs_sf, 0, n0, N, m0 + AHEAD, end, pitch, False, BLOCK_N, BLOCK_M)
            b = load_tile(e4m3_pointer(rhs, TCGEN05), k.to(tl.int64), in_k, m0, end, pitch, BLOCK_M)
            b_sf = load_scales(rhs_sf, 0, k0, K, m0 + AHEAD, end, pitch, False, BLOCK_K, BLOCK_M)
            if TCGEN05:
                a_next, b_next, a_sf, b_sf = a_sf, b_sf, a_next, b_next
            acc = dot_mx(a, a_sf, b, b_sf, acc, m0, HW_CAST, TCGEN05)
    elif TOKENS_LAST:
        for m0 in range(start, end, BLOCK_M):
            a = load_tile(lhs, row, in_n, m0, end, M, BLOCK_M)
            b = load_tile(rhs, k.to(tl.int64), in_k, m0, end, M, BLOCK_M)
            acc = dot_bf16(a, tl.trans(b), acc, m0, HW_CAST, TCGEN05)
    else:
        for m0 in range(start, end, BLOCK_M):
            m = m0 + tl.arange(0, BLOCK_M)
            a = load_tile(lhs, m.to(tl.int64), m < end, n0, N, N, BLOCK_N)
            b = load_tile(rhs, m.to(tl.int64), m < end, k0, K, K, BLOCK_K)
            acc = dot_bf16(tl.trans(a), b, acc, m0, HW_CAST, TCGEN05)
    store_tile(out, group.to(tl.int64) * N + row, in_n, k0, K, K, acc, whole, HW_CAST, TCGEN05)


@triton.jit
def mm_mx_kernel(
    lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    TCGEN05: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _m_grouped_tile(
        lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
        clear_rest, G, N, K, True, HW_CAST, TCGEN05, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def mm_bf16_kernel(
    lhs, rhs_t, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    TCGEN05: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _m_grouped_tile(
        lhs, None, rhs_t, None, group_ends, M, out,
        clear_rest, G, N, K, False, HW_CAST, TCGEN05, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def wgrad_mx_kernel(
    lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _k_grouped_tile(
        lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
        N, K, True, True, HW_CAST, TCGEN05, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def wgrad_bf16_kernel(
    lhs, rhs, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _k_grouped_tile(
        lhs, None, rhs, None, group_ends, M, out, N, K, False, False, HW_CAST, TCGEN05, BLOCK_M, BLOCK_N, BLOCK_K
    )


@triton.jit
def wgrad_bf16_t_kernel(
    lhs_t, rhs_t, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _k_grouped_tile(
        lhs_t, None, rhs_t, None, group_ends, M, out, N, K, False, True, HW_CAST, TCGEN05, BLOCK_M, BLOCK_N, BLOCK_K
    )
