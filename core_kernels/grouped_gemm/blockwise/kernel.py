"""Triton kernel of the blockwise product; plan.py draws the operands.

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
        square = rhs_sf + (group.to(tl.int64) * down + n0 // SIDE) * across  # BLOCK_N divides 128
        for k0 in range(0, K, BLOCK_K):
            a = load_tile(lhs_q, row, in_m, k0, K, K, BLOCK_K)
            b = load_tile(rhs_q, weight_row, in_n, k0, K, K, BLOCK_K)
            partial = dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), HW_CAST)
            of_row = tl.load(lhs_sf + row * across + k0 // SIDE, mask=in_m, other=0.0)
            acc += partial * (of_row * tl.load(square + k0 // SIDE))[:, None]
    store_tile(out, row, in_m, n0, N, N, acc, True, HW_CAST, False)
