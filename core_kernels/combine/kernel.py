"""Triton kernels of the top-k combine and of its gradient; plan.py defines the slots.

Both kernels are token-major. Forward, a program owns a few tokens and a tile of columns. Backward, a program owns one
token and all its columns: dy is read once for the K rows, and dprobs is one program's sum, in a fixed order. The last
programs of the backward launch write the padding rows. The kernels are memory-bound; offsets of rows have 64 bits.
"""

import triton
import triton.language as tl

from ..mx_math import BLOCK_MX, f32_to_bf16, quantize_blocks, to_f32


@triton.jit
def _store(out, value, mask, HW_CAST: tl.constexpr):
    """Store fp32 values as `out`'s dtype, fp32 or bf16."""
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out, f32_to_bf16(value, HW_CAST), mask=mask)
    else:
        tl.store(out, value, mask=mask)


@triton.jit
def combine_kernel(
    rows, slots, probs, R, T, y,
    D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, TILES: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of y (T, D). A row of y has TILES tiles."""
    tile = tl.program_id(0)
    t = (tile // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = (tile % TILES) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(slots + t * K + k, mask=t < T, other=-1).to(tl.int64)
        tl.device_assert((row >= -1) & (row < R), "slots point outside the rows")
        real = (row >= 0) & (row < R)
        x = to_f32(tl.load(rows + row[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0))
        # A slot without a row adds 0, which does not change acc: a sum that starts at +0 is never -0.
        if WEIGHTED:
            p = tl.load(probs + t * K + k, mask=real, other=0.0)
            acc += p[:, None] * x
        else:
            acc += x
    _store(y + t[:, None] * D + d[None, :], acc, (t < T)[:, None] & (d < D)[None, :], HW_CAST)


@triton.jit
def _store_rows(
    out, sf, rows, row, d0, real, value, D: tl.constexpr, QUANTIZE: tl.constexpr,
    rounding: tl.constexpr, satfinite: tl.constexpr, HW_CAST: tl.constexpr,
):  # fmt: skip
    """Store fp32 values in rows of D; if QUANTIZE, rounded to the dtype of `rows` and quantized."""
    S: tl.constexpr = value.shape[0]
    C: tl.constexpr = value.shape[1]
    d = d0 + tl.arange(0, C)
    inside = real[:, None] & (d < D)[None, :]
    if QUANTIZE:
        if rows.dtype.element_ty == tl.bfloat16:
            value = to_f32(f32_to_bf16(value, HW_CAST))
        value = tl.where(inside, value, 0.0)
        blocks = tl.reshape(value, (S, C // BLOCK_MX, BLOCK_MX))
        quantized = quantize_blocks(blocks, 2, rounding, satfinite, HW_CAST)
        codes, scales = quantized
        tl.store(out + row[:, None] * D + d[None, :], tl.reshape(codes, (S, C)), mask=inside)
        block = d0 // BLOCK_MX + tl.arange(0, C // BLOCK_MX)
        inside_sf = real[:, None] & (block < D // BLOCK_MX)[None, :]
        tl.store(sf + row[:, None] * (D // BLOCK_MX) + block[None, :], scales, mask=inside_sf)
    else:
        _store(out + row[:, None] * D + d[None, :], value, inside, HW_CAST)


@triton.jit
def _token(
    dy, rows, slots, probs, R, t, out, sf, dprobs,
    D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, QUANTIZE: tl.constexpr,
    rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The BLOCK_S >= K slots of token t: their rows of drows and their dprobs."""
    k = tl.arange(0, BLOCK_S)
    row = tl.load(slots + t * K + k, mask=k < K, other=-1).to(tl.int64)
    tl.device_assert((row >= -1) & (row < R), "slots point outside the rows")
    real = (row >= 0) & (row < R)
    dots = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    if WEIGHTED:
        p = tl.load(probs + t * K + k, mask=real, other=0.0)
    for d0 in range(0, D, BLOCK_K):
        d = d0 + tl.arange(0, BLOCK_K)
        inside = real[:, None] & (d < D)[None, :]
        offset = row[:, None] * D + d[None, :]
        g = to_f32(tl.load(dy + t * D + d, mask=d < D, other=0.0))[None, :]
        if WEIGHTED:
            x = to_f32(tl.load(rows + offset, mask=inside, other=0.0))
            # A slot without a row has zeros for x: infinity * 0 would be NaN.
            dots += tl.where(inside, g * x, 0.0)
            value = p[:, None] * g
        else:
            value = tl.broadcast_to(g, (BLOCK_S, BLOCK_K))
        _store_rows(out, sf, rows, row, d0, real, value, D, QUANTIZE, rounding, satfinite, HW_CAST)
    if WEIGHTED:
        tl.store(dprobs + t * K + k, tl.sum(dots, 1), mask=k < K)


@triton.jit
def _padding(order, R, first, out, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Zeros in the padding rows among BLOCK_M rows."""
    r = first + tl.arange(0, BLOCK_M)
    empty = tl.load(order + r, mask=r < R, other=0) < 0
    if tl.max(empty.to(tl.int32), 0) > 0:
        for d0 in range(0, D, BLOCK_K):
            d = d0 + tl.arange(0, BLOCK_K)
            zeros = tl.zeros((BLOCK_M, BLOCK_K), out.dtype.element_ty)
            tl.store(out + r[:, None] * D + d[None, :], zeros, mask=empty[:, None] & (d < D)[None, :])


@triton.jit
def combine_bwd_kernel(
    dy, rows, slots, order, probs, R, T, drows, dprobs,
    D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The first T programs own a token each, the rest BLOCK_M rows each."""
    i = tl.program_id(0)
    if i < T:
        _token(
            dy, rows, slots, probs, R, i.to(tl.int64), drows, None, dprobs, D, K, WEIGHTED, False, 0, False,
            HW_CAST, BLOCK_S, BLOCK_K,
        )  # fmt: skip
    else:
        _padding(order, R, (i - T).to(tl.int64) * BLOCK_M, drows, D, BLOCK_M, BLOCK_K)


@triton.jit
def combine_bwd_row_kernel(
    dy, rows, slots, order, probs, R, T, q, sf, dprobs,
    D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As combine_bwd_kernel. The scale of a block of zeros is byte 0, and so are its codes."""
    i = tl.program_id(0)
    if i < T:
        _token(
            dy, rows, slots, probs, R, i.to(tl.int64), q, sf, dprobs, D, K, WEIGHTED, True, rounding, satfinite,
            HW_CAST, BLOCK_S, BLOCK_K,
        )  # fmt: skip
    else:
        first = (i - T).to(tl.int64) * BLOCK_M
        _padding(order, R, first, q, D, BLOCK_M, BLOCK_K)
        _padding(order, R, first, sf, D // BLOCK_MX, BLOCK_M, BLOCK_K)
