"""Triton kernels of the blockwise product, and of the sum of two; plan.py draws the operands.

A step is at most 128 of K: the tensor core sums it, and its sum times both scales is added in fp32.
"""

import triton
import triton.language as tl

from ...formats import SQUARE
from ..exact.kernel import rows_of_tile
from ..exact.kernel_tile import load_tile, store_tile
from ..folded.kernel import dot

SIDE: tl.constexpr = tl.constexpr(SQUARE)


@triton.jit
def mm_kernel(
    lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _mm_tile(
        lhs_q, lhs_sf, rhs_q, rhs_sf, None, None, None, None, group_ends, M, out,
        clear_rest, G, N, K, False, HW_CAST, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def mm_sum_kernel(
    lhs_q, lhs_sf, rhs_q, rhs_sf, lhs2_q, lhs2_sf, rhs2_q, rhs2_sf, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _mm_tile(
        lhs_q, lhs_sf, rhs_q, rhs_sf, lhs2_q, lhs2_sf, rhs2_q, rhs2_sf, group_ends, M, out,
        clear_rest, G, N, K, True, HW_CAST, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _mm_tile(
    lhs_q, lhs_sf, rhs_q, rhs_sf, lhs2_q, lhs2_sf, rhs2_q, rhs2_sf, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TWO: tl.constexpr,
    HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of lhs rhs^T or, with TWO, of lhs rhs^T + lhs2 rhs2^T."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    down: tl.constexpr = (N + SIDE - 1) // SIDE
    across: tl.constexpr = (K + SIDE - 1) // SIDE
    n0 = (tl.program_id(0) % n_tiles) * BLOCK_N
    rows = rows_of_tile(tl.program_id(0) // n_tiles, group_ends, M, clear_rest, G, BLOCK_G, BLOCK_M)
    group, m0, end = rows
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    in_m, in_n = m < end, n < N
    row, weight_row = m.to(tl.int64), group.to(tl.int64) * N + n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if group < G:
        square = (group.to(tl.int64) * down + n0 // SIDE) * across  # BLOCK_N divides 128
        acc = _add_product(acc, lhs_q, lhs_sf, rhs_q, rhs_sf + square, row, weight_row, in_m, in_n, K, HW_CAST, BLOCK_K)
        if TWO:
            acc = _add_product(
                acc, lhs2_q, lhs2_sf, rhs2_q, rhs2_sf + square, row, weight_row, in_m, in_n, K, HW_CAST, BLOCK_K
            )
    store_tile(out, row, in_m, n0, N, N, acc, True, HW_CAST, False)


@triton.jit
def _add_product(
    acc, lhs_q, lhs_sf, rhs_q, squares, row, weight_row, in_m, in_n,
    K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + a b^T of a tile; squares: the scales of the weights along K."""
    across: tl.constexpr = (K + SIDE - 1) // SIDE
    for k0 in range(0, K, BLOCK_K):
        a = load_tile(lhs_q, row, in_m, k0, K, K, BLOCK_K)
        b = load_tile(rhs_q, weight_row, in_n, k0, K, K, BLOCK_K)
        partial = dot(a, b, tl.zeros(acc.shape, tl.float32), HW_CAST)
        of_row = tl.load(lhs_sf + row * across + k0 // SIDE, mask=in_m, other=0.0)
        acc += partial * (of_row * tl.load(squares + k0 // SIDE))[:, None]
    return acc
