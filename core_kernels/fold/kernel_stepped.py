"""Triton kernel of the stepped fold; plan_stepped.py draws the operands."""

import triton
import triton.language as tl

from ..formats import BLOCKS_OF_WORD, E8M0_NAN, STEP_ABOVE, STEP_BELOW, STEP_MOST
from ..mx_math import BLOCK_MX
from .kernel import fold_tile

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)
ABOVE: tl.constexpr = tl.constexpr(STEP_ABOVE)
BELOW: tl.constexpr = tl.constexpr(STEP_BELOW)
MOST: tl.constexpr = tl.constexpr(STEP_MOST)
SEARCHED: tl.constexpr = tl.constexpr(128)  # block scales of a row at a time, while the row's is searched
WORD: tl.constexpr = tl.constexpr(BLOCKS_OF_WORD)


@triton.jit
def _plain(byte):
    return (byte != 0) & (byte != NAN_BYTE)


@triton.jit
def _below(sf, in_m, most, blocks: tl.constexpr):
    """Rows of scale bytes, (R, 1) addresses -> (R, 1): how many plain ones are less than `most`, (R, 1)."""
    count = tl.zeros_like(most)
    for b0 in range(0, blocks, SEARCHED):
        b = (b0 + tl.arange(0, SEARCHED))[None, :]
        byte = tl.load(sf + b, mask=in_m & (b < blocks), other=0).to(tl.int32)
        count += tl.sum((_plain(byte) & (byte < most)).to(tl.int32), 1, keep_dims=True)
    return count


@triton.jit
def _row_scale(sf, in_m, blocks: tl.constexpr):
    """Rows of scale bytes, (R, 1) addresses -> (R, 1) the scales of the rows."""
    median = tl.where(in_m, 0, 0)
    wanted = tl.maximum(_below(sf, in_m, median + NAN_BYTE, blocks) - 1, 0) // 2
    for bit in tl.static_range(8):  # the largest byte that at most `wanted` are less than
        higher = median + (128 >> bit)
        median = tl.where(_below(sf, in_m, higher, blocks) <= wanted, higher, median)
    scale, top = tl.where(in_m, 0, 0), tl.where(in_m, 0, 0)
    for b0 in range(0, blocks, SEARCHED):
        b = (b0 + tl.arange(0, SEARCHED))[None, :]
        byte = tl.load(sf + b, mask=in_m & (b < blocks), other=0).to(tl.int32)
        plain = tl.where(_plain(byte), byte, 0)
        near = tl.where(plain <= median + ABOVE, plain, 0)
        scale = tl.maximum(scale, tl.max(near, 1, keep_dims=True))
        top = tl.maximum(top, tl.max(plain, 1, keep_dims=True))
    return tl.maximum(scale, top - MOST)


@triton.jit
def _step_scale(byte, row):
    shared = (byte == 0) | (byte == NAN_BYTE) | ((byte <= row) & (byte >= row - BELOW))
    return tl.where(shared, row, tl.maximum(byte, row - MOST))


@triton.jit
def fold_stepped_kernel(
    q, sf, M, qf, row_sf, step_sf, apart, K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_K: tl.constexpr
):
    """32 rows of one matrix, BLOCK_K of K at a time."""
    blocks: tl.constexpr = K // BLOCK_MX
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK_MX
    WORD_K: tl.constexpr = WORD * BLOCK_MX
    words: tl.constexpr = (K + WORD_K - 1) // WORD_K
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m = tile * BLOCK_MX + tl.arange(0, BLOCK_MX)
    in_m, row = (m < M)[:, None], (matrix * M + m)[:, None]
    of_row = _row_scale(sf + row * blocks, in_m, blocks)
    tl.store(row_sf + row, of_row.to(tl.uint8), mask=in_m)
    line = (matrix * tl.num_programs(0) + tile) * words
    for word in range(0, words):
        bits = 0
        for k0 in range(word * WORD_K, tl.minimum((word + 1) * WORD_K, K), BLOCK_K):
            k, block = tl.arange(0, BLOCK_K) + k0, tl.arange(0, BLOCKS) + k0 // BLOCK_MX
            b, in_b = block[None, :], in_m & (block < blocks)[None, :]
            byte = tl.load(sf + row * blocks + b, mask=in_b, other=0).to(tl.int32)
            scale = _step_scale(byte, of_row)
            bits += tl.sum(tl.max((in_b & (scale != of_row)).to(tl.int32), 0) << block % WORD, 0)
            tl.store(step_sf + (matrix * blocks + b) * M + m[:, None], scale.to(tl.uint8), mask=in_b)
            inside, at = in_m & (k < K)[None, :], row * K + k[None, :]
            tile_q = tl.reshape(tl.load(q + at, mask=inside, other=0), (BLOCK_MX, BLOCKS, BLOCK_MX))
            folded = fold_tile(tile_q, byte, scale, 2, HW_CAST)
            tl.store(qf + at, tl.reshape(folded, (BLOCK_MX, BLOCK_K)), mask=inside)
        tl.store(apart + line + word, bits)
