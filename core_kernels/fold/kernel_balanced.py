"""Triton kernels of the balanced fold; plan_balanced.py draws the operands."""

import triton
import triton.language as tl

from ..mx_math import BLOCK_MX
from .kernel import NAN_BYTE, SPAN_MX, fold_tile

NONE: tl.constexpr = tl.constexpr(255)  # the level of no scale at all
WITHOUT: tl.constexpr = tl.constexpr(-1000)  # less than the exponent of any block


@triton.jit
def _clamped(end, M):
    return tl.minimum(tl.maximum(end, 0), M)


@triton.jit
def span_levels_kernel(
    sf, group_ends, M, levels,
    G: tl.constexpr, GROUPS: tl.constexpr, B: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One slot, BLOCK_M rows at a time."""
    slot, g, b = tl.program_id(0), tl.arange(0, GROUPS), tl.arange(0, BLOCK_B)[None, :]
    ends = _clamped(tl.load(group_ends + g, mask=g < G, other=0), M)
    group = tl.sum(((g < G) & (ends // SPAN_MX + g < slot)).to(tl.int32), 0)
    start = _clamped(tl.load(group_ends + group - 1, mask=group > 0, other=0), M)
    end = _clamped(tl.load(group_ends + group, mask=group < G, other=0), M)
    begin = start + (slot - start // SPAN_MX - group) * SPAN_MX
    end = tl.minimum(end, begin + SPAN_MX)
    least = tl.full((BLOCK_M, BLOCK_B), NONE, tl.int32)
    for m0 in range(begin, end, BLOCK_M):
        m = (m0 + tl.arange(0, BLOCK_M))[:, None]
        byte = tl.load(sf + m.to(tl.int64) * B + b, mask=(m < end) & (b < B), other=0).to(tl.int32)
        plain = (byte != 0) & (byte != NAN_BYTE)
        largest = tl.max(tl.where(plain, byte, 0), 1, keep_dims=True)
        least = tl.minimum(least, tl.where(plain, largest - byte, NONE))
    out = tl.min(least, 0, keep_dims=True)
    tl.store(levels + slot.to(tl.int64) * B + b, out.to(tl.uint8), mask=b < B)


@triton.jit
def group_levels_kernel(levels, group_ends, S, level, B: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_B: tl.constexpr):
    """One group and BLOCK_B blocks, BLOCK_S spans at a time."""
    group, b = tl.program_id(0), (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B))[None, :]
    start = tl.maximum(tl.load(group_ends + group - 1, mask=group > 0, other=0), 0)
    rows = tl.maximum(tl.load(group_ends + group) - start, 0)
    first = start // SPAN_MX + group
    end = tl.minimum(first + (rows + SPAN_MX - 1) // SPAN_MX, S)
    least = tl.full((BLOCK_S, BLOCK_B), NONE, tl.int32)
    for s0 in range(first, end, BLOCK_S):
        s = (s0 + tl.arange(0, BLOCK_S))[:, None]
        at = levels + s.to(tl.int64) * B + b
        least = tl.minimum(least, tl.load(at, mask=(s < end) & (b < B), other=NONE).to(tl.int32))
    out = tl.min(least, 0, keep_dims=True)
    tl.store(level + group * B + b, tl.where(out == NONE, 0, out).to(tl.uint8), mask=b < B)


@triton.jit
def fold_balanced_kernel(
    q, sf, own, other, group_ends, M, qf, row_sf,
    K: tl.constexpr, G: tl.constexpr, GROUPS: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M whole rows."""
    blocks: tl.constexpr = K // BLOCK_MX
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK_MX
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k, b, g = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCKS)[None, :], tl.arange(0, GROUPS)[None, :]
    in_m, row = (m < M)[:, None], m[:, None]
    tile_q = tl.load(q + row * K + k, mask=in_m & (k < K), other=0)
    byte = tl.load(sf + row * blocks + b, mask=in_m & (b < blocks), other=0).to(tl.int32)
    ends = tl.load(group_ends + g, mask=g < G, other=0)
    group = tl.sum(((g < G) & (ends <= row)).to(tl.int32), 1, keep_dims=True)
    of_group, at = (group < G) & (b < blocks), group * blocks + b
    above = tl.load(own + at, mask=of_group, other=0).to(tl.int32)
    apart = above - tl.load(other + at, mask=of_group, other=0).to(tl.int32)
    half = tl.abs(apart) >> 1
    moved = tl.minimum(byte + tl.where(apart < 0, -half, half), NAN_BYTE - 1)
    exponent = tl.where((byte == 0) | (byte == NAN_BYTE), byte, moved)
    counts = (b < blocks) & (byte != NAN_BYTE)
    largest = tl.max(tl.where(counts, exponent, WITHOUT), 1, keep_dims=True)
    scale = tl.maximum(largest, 0)
    folded = fold_tile(tl.reshape(tile_q, (BLOCK_M, BLOCKS, BLOCK_MX)), exponent, scale, 2, HW_CAST)
    tl.store(qf + row * K + k, tl.reshape(folded, (BLOCK_M, BLOCK_K)), mask=in_m & (k < K))
    tl.store(row_sf + row, tl.where(largest == WITHOUT, NAN_BYTE, scale).to(tl.uint8), mask=in_m)
