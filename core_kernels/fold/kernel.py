"""Triton kernels of folding; plan.py draws the operands.

A program of `fold_kernel`, `permute_fold_kernel` and `quantize_fold_kernel` holds whole rows, since a row's scale needs
all of its blocks, and loops over the rows up to the last end. A program of `fold_groups_kernel` processes the spans of
a group in order, with a running maximum per row.
"""

import triton
import triton.language as tl

from ..formats import E8M0_NAN, HEADROOM, SPAN
from ..mx_math import BLOCK_MX, F32_NAN, e4m3_to_f32, f32_to_e4m3, quantize_blocks, to_f32
from ..tokens import rows_with_ends, tokens_of

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)
SPAN_MX: tl.constexpr = tl.constexpr(SPAN)
HEADROOM_MX: tl.constexpr = tl.constexpr(HEADROOM)


@triton.jit
def fold_tile(q_blocks, byte, scale, axis: tl.constexpr, HW_CAST: tl.constexpr):
    """Blocks of q along `axis` with scale bytes `byte` (int32, without the axis) -> blocks with scale byte `scale`."""
    # 448 * 2^-32 rounds to zero, and 2^-254 is not an fp32 number
    shift = tl.maximum(byte - scale, -32)
    factor = tl.where(byte == NAN_BYTE, F32_NAN, (127 + shift) << 23).to(tl.float32, bitcast=True)
    return f32_to_e4m3(e4m3_to_f32(q_blocks, HW_CAST) * tl.expand_dims(factor, axis), HW_CAST)


@triton.jit
def store_folded(
    q_blocks, sf_tile, m, k, kb, M, qf, row_sf,
    K: tl.constexpr, headroom: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Fold rows m, given as q (BLOCK_M, BLOCK_K / 32, 32) and sf (BLOCK_M, BLOCK_K / 32), and store them."""
    byte = sf_tile.to(tl.int32)
    counts = (kb < K // BLOCK_MX)[None, :] & (byte != NAN_BYTE)
    row = tl.max(tl.where(counts, byte, -1), 1)
    if headroom > 0:
        first = tl.max(tl.where(counts & (kb < SPAN_MX // BLOCK_MX)[None, :], byte, -1), 1)
        least = tl.where(first < 0, -1, tl.minimum(first + headroom, NAN_BYTE - 1))
        row = tl.maximum(row, least)
        raised = tl.maximum(byte, least[:, None])
        q_blocks = fold_tile(q_blocks, byte, raised, 2, HW_CAST)
        byte = raised
    folded = fold_tile(q_blocks, byte, row[:, None], 2, HW_CAST)
    inside = (m < M)[:, None] & (k < K)[None, :]
    tl.store(qf + m[:, None] * K + k[None, :], tl.reshape(folded, (BLOCK_M, BLOCK_K)), mask=inside)
    tl.store(row_sf + m, tl.where(row < 0, NAN_BYTE, row).to(tl.uint8), mask=m < M)


@triton.jit
def fold_kernel(
    q, sf, group_ends, M, qf, row_sf,
    K: tl.constexpr, G: tl.constexpr, headroom: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k, kb = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // BLOCK_MX)
    scales: tl.constexpr = K // BLOCK_MX
    rows = rows_with_ends(group_ends, M, G)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        m = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = (m < rows)[:, None]
        q_tile = tl.load(q + m[:, None] * K + k[None, :], mask=inside & (k < K)[None, :], other=0)
        sf_tile = tl.load(sf + m[:, None] * scales + kb[None, :], mask=inside & (kb < scales)[None, :], other=0)
        blocks = tl.reshape(q_tile, (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
        store_folded(blocks, sf_tile, m, k, kb, rows, qf, row_sf, K, headroom, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def permute_fold_kernel(
    packed, row_map, group_ends, R, P, qf, row_sf,
    K: tl.constexpr, G: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k, kb = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // BLOCK_MX)
    scales: tl.constexpr = K // BLOCK_MX
    rows = rows_with_ends(group_ends, P, G)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        i = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        row = tl.load(row_map + i, mask=i < rows, other=-1).to(tl.int64)
        tl.device_assert((row >= -1) & (row < R), "row_map points outside the input")
        real, first = ((row >= 0) & (row < R))[:, None], packed + (row * (K + scales))[:, None]
        q_tile = tl.load(first + k[None, :], mask=real & (k < K)[None, :], other=0)
        sf_tile = tl.load(first + K + kb[None, :], mask=real & (kb < scales)[None, :], other=0)
        blocks = tl.reshape(q_tile, (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
        store_folded(blocks, sf_tile, i, k, kb, rows, qf, row_sf, K, 0, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def quantize_fold_kernel(
    x, group_ends, M, qf, row_sf,
    K: tl.constexpr, G: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr, headroom: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    k, kb = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // BLOCK_MX)
    rows = rows_with_ends(group_ends, M, G)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        m = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        v = tl.load(x + m[:, None] * K + k[None, :], mask=(m < rows)[:, None] & (k < K)[None, :], other=0.0)
        blocks = tl.reshape(to_f32(v), (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
        q_blocks, sf_tile = quantize_blocks(blocks, 2, rounding, satfinite, HW_CAST)
        store_folded(q_blocks, sf_tile, m, k, kb, rows, qf, row_sf, K, headroom, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def fold_groups_kernel(
    q, sf, group_ends, R, M, qf, span_sf,
    G: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one group of columns, span by span. Group G, after the last one, has slots alone."""
    BLOCKS: tl.constexpr = SPAN_MX // BLOCK_MX
    r, group = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    in_r, pitch = (r < R)[:, None], M // BLOCK_MX
    before = tl.load(group_ends + group - 1, mask=group > 0, other=0)
    tokens = tokens_of(before, tl.load(group_ends + group, mask=group < G, other=M), M, BLOCK_MX)
    first, last, whole = tokens
    broken = (group < G) & (whole == 0)
    # In blocks: the multiplication by 32 below tells the compiler the alignment, and it loads 16 bytes at a time.
    start, end = first // BLOCK_MX, last // BLOCK_MX
    slot, end_slot = start // BLOCKS + group, end // BLOCKS + group + (group < G).to(tl.int32)

    largest = tl.zeros((BLOCK_M,), tl.int32)  # scale byte + 1; 0: no scale so far
    for b0 in range(start, tl.where(group < G, end, start), BLOCKS):
        b, m = b0 + tl.arange(0, BLOCKS), tl.arange(0, SPAN_MX) + b0 * BLOCK_MX
        inside, at = in_r & (m < end * BLOCK_MX)[None, :], r[:, None] * (pitch * BLOCK_MX) + m[None, :]
        byte = tl.load(sf + r[:, None] * pitch + b[None, :], mask=in_r & (b < end)[None, :], other=NAN_BYTE)
        byte = byte.to(tl.int32)
        here = tl.max(tl.where(byte == NAN_BYTE, 0, byte + 1), 1)
        headroom = tl.where((b0 == start) & (here > 0), HEADROOM_MX, 0)
        largest = tl.maximum(largest, tl.minimum(here + headroom, NAN_BYTE))
        scale = tl.maximum(largest - 1, 0)
        blocks = tl.reshape(tl.load(q + at, mask=inside, other=0), (BLOCK_M, BLOCKS, BLOCK_MX))
        folded = fold_tile(blocks, byte, scale[:, None], 2, HW_CAST)
        tl.store(qf + at, tl.reshape(folded, (BLOCK_M, SPAN_MX)), mask=inside)
        tl.store(span_sf + slot * R + r, tl.where(broken, NAN_BYTE, scale).to(tl.uint8), mask=r < R)
        slot += 1
    for unused in range(slot, end_slot):
        no_scale = tl.zeros((BLOCK_M,), tl.int32) + tl.where(broken, NAN_BYTE, 0)
        tl.store(span_sf + unused * R + r, no_scale.to(tl.uint8), mask=r < R)
