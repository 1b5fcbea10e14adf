"""Triton kernels of the balanced fold; plan_balanced.py draws the operands."""

import triton
import triton.language as tl

from ..formats import E8M0_NAN
from ..mx_math import BLOCK_MX
from .kernel import fold_tile

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)


@triton.jit
def balance_kernel(sf, N, balanced_sf, lift, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """A program reads the scales of one group twice: for the largest of each block, and to raise them."""
    group = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCK_B)
    top = tl.zeros((BLOCK_B,), tl.int32)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        at, inside = (group * N + n)[:, None] * BLOCKS + b[None, :], (n < N)[:, None] & (b < BLOCKS)[None, :]
        byte = tl.load(sf + at, mask=inside, other=0).to(tl.int32)
        top = tl.maximum(top, tl.max(tl.where(byte == NAN_BYTE, 0, byte), 0))
    raised = tl.where(top > 0, tl.max(top, 0) - top, 0)
    tl.store(lift + group * BLOCKS + b, raised.to(tl.uint8), mask=b < BLOCKS)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        at, inside = (group * N + n)[:, None] * BLOCKS + b[None, :], (n < N)[:, None] & (b < BLOCKS)[None, :]
        byte = tl.load(sf + at, mask=inside, other=0).to(tl.int32)
        tl.store(
            balanced_sf + at, tl.where(byte == NAN_BYTE, NAN_BYTE, byte + raised[None, :]).to(tl.uint8), mask=inside
        )


@triton.jit
def fold_balanced_kernel(
    q, sf, lift, group_ends, M, qf, row_sf,
    K: tl.constexpr, G: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    scales: tl.constexpr = K // BLOCK_MX
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k, kb, g = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // BLOCK_MX), tl.arange(0, BLOCK_G)
    ends = tl.load(group_ends + g, mask=g < G, other=0)
    group = tl.sum(((g < G)[None, :] & (ends[None, :] <= m[:, None])).to(tl.int32), 1)  # G: past the last end
    inside_sf = (m < M)[:, None] & (kb < scales)[None, :]
    byte = tl.load(sf + m[:, None] * scales + kb[None, :], mask=inside_sf, other=NAN_BYTE).to(tl.int32)
    in_group = inside_sf & (group < G)[:, None]
    down = tl.load(lift + group[:, None] * scales + kb[None, :], mask=in_group, other=0).to(tl.int32)
    lowered = byte - tl.where(byte == NAN_BYTE, 0, down)
    row = tl.maximum(tl.max(tl.where(byte == NAN_BYTE, -1, lowered), 1), 0)
    any = tl.max((byte != NAN_BYTE).to(tl.int32), 1)
    inside, at = (m < M)[:, None] & (k < K)[None, :], m[:, None] * K + k[None, :]
    blocks = tl.reshape(tl.load(q + at, mask=inside, other=0), (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
    # A NaN block keeps its byte, which fold_tile recognises; no other difference is 255.
    folded = fold_tile(blocks, lowered, row[:, None], 2, HW_CAST)
    tl.store(qf + at, tl.reshape(folded, (BLOCK_M, BLOCK_K)), mask=inside)
    tl.store(row_sf + m, tl.where(any > 0, row, NAN_BYTE).to(tl.uint8), mask=m < M)
