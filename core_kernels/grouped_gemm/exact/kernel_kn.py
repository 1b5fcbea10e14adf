"""Triton kernels of the products with weights (G, K, N); plan_kn.py draws the operands. Sums are fp32."""

import triton
import triton.language as tl

from .kernel import rows_of_tile
from .kernel_tile import dot_bf16, load_tile, store_tile


@triton.jit
def _product(
    acc, lhs, rhs, row, in_m, group, n0, STEP: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    HW_CAST: tl.constexpr, TCGEN05: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + lhs rhs[group]. STEP: added to k0, so that no two products of a kernel have the same `step`."""
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = load_tile(lhs, row, in_m, k0, K, K, BLOCK_K)
        b = load_tile(rhs, group.to(tl.int64) * K + k, k < K, n0, N, N, BLOCK_N)
        acc = dot_bf16(a, b, acc, STEP + k0, HW_CAST, TCGEN05)
    return acc


@triton.jit
def _tile(
    lhs, rhs, lhs2, rhs2, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SUM: tl.constexpr,
    HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n0 = (tl.program_id(0) % n_tiles) * BLOCK_N
    rows = rows_of_tile(tl.program_id(0) // n_tiles, group_ends, M, clear_rest, G, BLOCK_G, BLOCK_M)
    group, m0, end = rows
    m = m0 + tl.arange(0, BLOCK_M)
    in_m, row = m < end, m.to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if group < G:
        acc = _product(acc, lhs, rhs, row, in_m, group, n0, 0, N, K, HW_CAST, TCGEN05, BLOCK_N, BLOCK_K)
        if SUM:
            acc = _product(acc, lhs2, rhs2, row, in_m, group, n0, K, N, K, HW_CAST, TCGEN05, BLOCK_N, BLOCK_K)
    store_tile(out, row, in_m, n0, N, N, acc, True, HW_CAST, TCGEN05)


@triton.jit
def mm_kernel(
    lhs, rhs, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    TCGEN05: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _tile(
        lhs, rhs, None, None, group_ends, M, out,
        clear_rest, G, N, K, False, HW_CAST, TCGEN05, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def mm_sum_kernel(
    lhs, rhs, lhs2, rhs2, group_ends, M, out,
    clear_rest: tl.constexpr, G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    TCGEN05: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _tile(
        lhs, rhs, lhs2, rhs2, group_ends, M, out,
        clear_rest, G, N, K, True, HW_CAST, TCGEN05, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
