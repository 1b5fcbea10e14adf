"""Triton kernel of the gradient of the tokens; plan_logits.py draws the operands. A program has one tile of the result,
whose sums begin with dx."""

import triton
import triton.language as tl

from ..grouped_gemm.exact.kernel_tile import dot_bf16, load_tile, store_tile
from ..mx_math import to_f32


@triton.jit
def logits_bwd_kernel(
    dlogits, weight, dx, T, total,
    E: tl.constexpr, D: tl.constexpr, ADDS: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    n_tiles: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    n0 = (tl.program_id(0) % n_tiles) * BLOCK_N
    m = tl.program_id(0) // n_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, row = m < T, m.to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if ADDS:
        acc += to_f32(load_tile(dx, row, inside, n0, D, D, BLOCK_N))
    for e0 in range(0, E, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        w = load_tile(weight, e.to(tl.int64), e < E, n0, D, D, BLOCK_N)
        high = load_tile(dlogits, row, inside, e0, E, 2 * E, BLOCK_E)
        acc = dot_bf16(high, w, acc, e0, HW_CAST, TCGEN05)
        low = load_tile(dlogits + E, row, inside, e0, E, 2 * E, BLOCK_E)
        acc = dot_bf16(low, w, acc, E + e0, HW_CAST, TCGEN05)
    store_tile(total, row, inside, n0, D, D, acc, True, HW_CAST, TCGEN05)
