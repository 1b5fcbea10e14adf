"""Triton kernel of the stepped product; plan_stepped.py draws the operands.

It multiplies 32 terms at a time everywhere, and reads the scales of every step; Hopper's kernel does so where a block
is apart.
"""

import triton
import triton.language as tl

from ..mx_math import BLOCK_MX
from .kernel import rows_of_tile
from .kernel_folded import dot, rescale_factor, scaled
from .kernel_tile import load_tile, store_tile


@triton.jit
def mm_kernel(
    lhs_qf, lhs_sf, lhs_step_sf, lhs_apart, rhs_qf, rhs_sf, rhs_step_sf, rhs_apart, group_ends, M, out,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = K // BLOCK_MX
    n0 = (tl.program_id(0) % n_tiles) * BLOCK_N
    rows = rows_of_tile(tl.program_id(0) // n_tiles, group_ends, M, G, BLOCK_G, BLOCK_M)
    group, m0, end = rows
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    in_m, in_n = m < end, n < N
    row, weight = m.to(tl.int64), group.to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if group < G:
        of_rows, of_cols = lhs_step_sf + row, rhs_step_sf + weight * steps * N + n
        row_byte = tl.load(lhs_sf + row, mask=in_m, other=0).to(tl.int32)
        col_byte = tl.load(rhs_sf + weight * N + n, mask=in_n, other=0).to(tl.int32)
        for step in range(0, steps):
            row_now = tl.load(of_rows, mask=in_m, other=0).to(tl.int32)
            col_now = tl.load(of_cols, mask=in_n, other=0).to(tl.int32)
            of_rows, of_cols = of_rows + M, of_cols + N
            a = load_tile(lhs_qf, row, in_m, step * BLOCK_MX, K, K, BLOCK_MX)
            b = load_tile(rhs_qf, weight * N + n, in_n, step * BLOCK_MX, K, K, BLOCK_MX)
            partial = dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), HW_CAST)
            acc += partial * rescale_factor(row_byte - row_now)[:, None] * rescale_factor(col_byte - col_now)[None, :]
        acc = scaled(acc, row_byte, col_byte)
    store_tile(out, row, in_m, n0, N, N, acc, True, HW_CAST, False)
