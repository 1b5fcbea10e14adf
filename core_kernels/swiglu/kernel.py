"""Triton kernels of SwiGLU and of its gradient; plan.py draws the operands, and composes the ops that quantize.

dprob is a sum over whole rows: a backward program with `prob` loops over the tiles of its rows, one without `prob` owns
a single tile.
"""

import triton
import triton.language as tl

from ..mx_math import f32_to_bf16, to_f32
from ..mx_math import sigmoid as _sigmoid
from ..quantize.kernel_blockwise import store_rows
from ..tokens import rows_with_ends

ONE_BITS, INFINITY_BITS = tl.constexpr(0x3F800000), tl.constexpr(0x7F800000)
"""The bits of fp32: alpha, limit and offset of silu(gate) * up are 1, infinity and 0."""


@triton.jit
def _number(bits: tl.constexpr):
    """fp32 of its bits."""
    return tl.full((), bits, tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _gated(g, u, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr, HW_CAST: tl.constexpr):
    """The sigmoid, gate * sigmoid, and up, of gate and up after the limit and the offset."""
    if alpha == ONE_BITS and limit == INFINITY_BITS and offset == 0:
        sig = _sigmoid(g, HW_CAST)
        return sig, g * sig, u
    else:
        most = _number(limit)
        g = tl.where(g > most, most, g)
        u = tl.where(u > most, most, u)
        u = tl.where(u < -most, -most, u) + _number(offset)
        sig = _sigmoid(g * _number(alpha), HW_CAST)
        return sig, g * sig, u


@triton.jit
def forward_kernel(
    gate, up, prob, group_ends, M, h,
    F: tl.constexpr, G: tl.constexpr, WEIGHTED: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr,
    offset: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_K) tiles of the rows of h up to the last end."""
    k_tiles: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    rows = rows_with_ends(group_ends, M, G)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * k_tiles, tl.num_programs(0)):
        m0, k0 = (tile // k_tiles) * BLOCK_M, (tile % k_tiles) * BLOCK_K
        m, k = (m0 + tl.arange(0, BLOCK_M)).to(tl.int64), k0 + tl.arange(0, BLOCK_K)
        at, inside, v = _hidden(gate, up, prob, m, k, rows, F, WEIGHTED, alpha, limit, offset, HW_CAST)
        tl.store(h + at, f32_to_bf16(v, HW_CAST), mask=inside)


@triton.jit
def blockwise_kernel(
    gate, up, prob, group_ends, M, q, sf,
    F: tl.constexpr, G: tl.constexpr, WEIGHTED: tl.constexpr, power_of_two: tl.constexpr, alpha: tl.constexpr,
    limit: tl.constexpr, offset: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`forward_kernel`, whose tiles of h are quantized blockwise and not stored."""
    k_tiles: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    rows = rows_with_ends(group_ends, M, G)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * k_tiles, tl.num_programs(0)):
        m0, k0 = (tile // k_tiles) * BLOCK_M, (tile % k_tiles) * BLOCK_K
        m, k = (m0 + tl.arange(0, BLOCK_M)).to(tl.int64), k0 + tl.arange(0, BLOCK_K)
        at, inside, v = _hidden(gate, up, prob, m, k, rows, F, WEIGHTED, alpha, limit, offset, HW_CAST)
        v = to_f32(f32_to_bf16(v, HW_CAST))
        store_rows(v, at, inside, m, k0, rows, q, sf, F, power_of_two, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def _hidden(
    gate, up, prob, m, k, rows,
    F: tl.constexpr, WEIGHTED: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr, offset: tl.constexpr,
    HW_CAST: tl.constexpr,
):  # fmt: skip
    """h of rows m below `rows` and columns k below F in fp32: the offsets of its values, which of them exist, and the
    values: zeros where none exist, or NaN in a row without a finite value, whose weight is not finite."""
    at, inside = m[:, None] * F + k[None, :], (m < rows)[:, None] & (k < F)[None, :]
    g = to_f32(tl.load(gate + at, mask=inside, other=0.0))
    u = to_f32(tl.load(up + at, mask=inside, other=0.0))
    _, silu, u = _gated(g, u, alpha, limit, offset, HW_CAST)
    v = silu * u
    if WEIGHTED:
        v = v * tl.load(prob + m, mask=m < rows, other=0.0)[:, None]
    return at, inside, v


@triton.jit
def bwd_kernel(
    dh, gate, up, prob, group_ends, M, dgate, dup, dprob,
    F: tl.constexpr, G: tl.constexpr, WEIGHTED: tl.constexpr, alpha: tl.constexpr, limit: tl.constexpr,
    offset: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Strips of BLOCK_M rows of dgate and dup up to the last end, tile by tile from left to right.

    Programs along axis 1 share the tiles of a strip. With `prob` there is one program per strip, which also sums dprob.
    Past the last end dprob is zeros.
    """
    rows = rows_with_ends(group_ends, M, G)
    for strip in range(tl.program_id(0), tl.cdiv(M if WEIGHTED else rows, BLOCK_M), tl.num_programs(0)):
        m = (strip * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        if WEIGHTED:
            p = tl.load(prob + m, mask=m < rows, other=0.0)[:, None]
        end = tl.where(strip * BLOCK_M < rows, F, 0)
        for k0 in range(tl.program_id(1) * BLOCK_K, end, tl.num_programs(1) * BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            at, inside = m[:, None] * F + k[None, :], (m < rows)[:, None] & (k < F)[None, :]
            g = to_f32(tl.load(gate + at, mask=inside, other=0.0))
            u = to_f32(tl.load(up + at, mask=inside, other=0.0))
            d = to_f32(tl.load(dh + at, mask=inside, other=0.0))
            sig, silu, u_offset = _gated(g, u, alpha, limit, offset, HW_CAST)
            if WEIGHTED:
                total += d * (silu * u_offset)
                d = d * p
            v_gate, v_up = _gradients(d, g, u, sig, silu, u_offset, alpha, limit)
            tl.store(dgate + at, f32_to_bf16(v_gate, HW_CAST), mask=inside)
            tl.store(dup + at, f32_to_bf16(v_up, HW_CAST), mask=inside)
        if WEIGHTED:
            tl.store(dprob + m, tl.sum(total, 1), mask=m < M)


@triton.jit
def _gradients(d, g, u, sig, silu, u_offset, alpha: tl.constexpr, limit: tl.constexpr):
    """dgate and dup in fp32 of the gradient of silu * u_offset, and of `_gated` of g and u."""
    steep = silu if alpha == ONE_BITS else silu * _number(alpha)
    v_gate, v_up = (d * u_offset) * (sig + steep * (1.0 - sig)), d * silu
    if limit != INFINITY_BITS:
        most = _number(limit)
        v_gate, v_up = tl.where(g > most, 0.0, v_gate), tl.where(tl.abs(u) > most, 0.0, v_up)
    return v_gate, v_up


@triton.jit
def bwd_blockwise_kernel(
    dh, gate, up, prob, group_ends, M, dgate_q, dgate_sf, dup_q, dup_sf,
    F: tl.constexpr, G: tl.constexpr, WEIGHTED: tl.constexpr, power_of_two: tl.constexpr, alpha: tl.constexpr,
    limit: tl.constexpr, offset: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_K) tiles of dgate and dup up to the last end, quantized blockwise."""
    k_tiles: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    rows = rows_with_ends(group_ends, M, G)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * k_tiles, tl.num_programs(0)):
        m0, k0 = (tile // k_tiles) * BLOCK_M, (tile % k_tiles) * BLOCK_K
        m, k = (m0 + tl.arange(0, BLOCK_M)).to(tl.int64), k0 + tl.arange(0, BLOCK_K)
        at, inside = m[:, None] * F + k[None, :], (m < rows)[:, None] & (k < F)[None, :]
        g = to_f32(tl.load(gate + at, mask=inside, other=0.0))
        u = to_f32(tl.load(up + at, mask=inside, other=0.0))
        d = to_f32(tl.load(dh + at, mask=inside, other=0.0))
        sig, silu, u_offset = _gated(g, u, alpha, limit, offset, HW_CAST)
        if WEIGHTED:
            d = d * tl.load(prob + m, mask=m < rows, other=0.0)[:, None]
        v_gate, v_up = _gradients(d, g, u, sig, silu, u_offset, alpha, limit)
        # A NaN weight makes values NaN that do not exist, in a row whose values may all be clamped and zeros.
        v_gate = tl.where(inside, to_f32(f32_to_bf16(v_gate, HW_CAST)), 0.0)
        v_up = tl.where(inside, to_f32(f32_to_bf16(v_up, HW_CAST)), 0.0)
        store_rows(v_gate, at, inside, m, k0, rows, dgate_q, dgate_sf, F, power_of_two, HW_CAST, BLOCK_M, BLOCK_K)
        store_rows(v_up, at, inside, m, k0, rows, dup_q, dup_sf, F, power_of_two, HW_CAST, BLOCK_M, BLOCK_K)
