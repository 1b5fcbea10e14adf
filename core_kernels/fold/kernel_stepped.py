"""Triton kernel of the stepped fold; plan_stepped.py draws the operands."""

import triton
import triton.language as tl

from ..formats import E8M0_MAX, E8M0_NAN, MIDDLE_BLOCKS, STAGE, STAGES_OF_WORD, STEP_OCTAVES, STEP_REACH
from ..mx_math import BLOCK_MX
from .kernel import fold_tile

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)
LARGEST: tl.constexpr = tl.constexpr(E8M0_MAX)
FIRST: tl.constexpr = tl.constexpr(MIDDLE_BLOCKS)
REACH: tl.constexpr = tl.constexpr(STEP_REACH)
OCTAVES: tl.constexpr = tl.constexpr(STEP_OCTAVES)
STEPS: tl.constexpr = tl.constexpr(STAGE // 32)
WORD: tl.constexpr = tl.constexpr(STAGES_OF_WORD)


@triton.jit
def _plain(byte):
    return (byte != 0) & (byte != NAN_BYTE)


@triton.jit
def _middle(first):
    """(R, 8) scale bytes of a row's first blocks, 0 beyond its end -> (R,) the lower median of the plain ones."""
    plain = _plain(first)
    key = tl.where(plain, first, NAN_BYTE) * FIRST + tl.arange(0, FIRST)[None, :]  # no two are equal
    rank = tl.sum((key[:, None, :] < key[:, :, None]).to(tl.int32), 2)
    wanted = (tl.sum(plain.to(tl.int32), 1) - 1) // 2
    return tl.sum(tl.where(plain & (rank == wanted[:, None]), first, 0), 1)


@triton.jit
def _step_scale(byte, middle):
    distance = tl.where(_plain(byte), byte - middle, 0)
    beyond = tl.maximum(tl.abs(distance) - REACH, 0)
    steps = (beyond + (OCTAVES - 1)) // OCTAVES * OCTAVES
    return tl.minimum(middle + REACH + tl.where(distance < 0, -steps, steps), LARGEST)


@triton.jit
def fold_stepped_kernel(
    q, sf, M, qf, row_sf, step_sf, apart, K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_K: tl.constexpr
):
    """32 rows of one matrix, BLOCK_K of K at a time."""
    blocks: tl.constexpr = K // BLOCK_MX
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK_MX
    STAGES: tl.constexpr = BLOCKS // STEPS
    WORD_K: tl.constexpr = WORD * STEPS * BLOCK_MX
    words: tl.constexpr = (K + WORD_K - 1) // WORD_K
    tile, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m = tile * BLOCK_MX + tl.arange(0, BLOCK_MX)
    in_m, row = (m < M)[:, None], (matrix * M + m)[:, None]
    first = tl.arange(0, FIRST)[None, :]
    middle = _middle(tl.load(sf + row * blocks + first, mask=in_m & (first < blocks), other=0).to(tl.int32))[:, None]
    of_row = tl.minimum(middle + REACH, LARGEST)
    tl.store(row_sf + row, of_row.to(tl.uint8), mask=in_m)
    line = (matrix * tl.num_programs(0) + tile) * words
    for word in range(0, words):
        bits = 0
        for k0 in range(word * WORD_K, tl.minimum((word + 1) * WORD_K, K), BLOCK_K):
            k, block = tl.arange(0, BLOCK_K) + k0, tl.arange(0, BLOCKS) + k0 // BLOCK_MX
            b, in_b = block[None, :], in_m & (block < blocks)[None, :]
            byte = tl.load(sf + row * blocks + b, mask=in_b, other=0).to(tl.int32)
            scale = _step_scale(byte, middle)
            stage = tl.max(tl.reshape(tl.max((in_b & (scale != of_row)).to(tl.int32), 0), (STAGES, STEPS)), 1)
            bits += tl.sum(stage << (tl.arange(0, STAGES) + k0 // (STEPS * BLOCK_MX) % WORD), 0)
            tl.store(step_sf + (matrix * blocks + b) * M + m[:, None], scale.to(tl.uint8), mask=in_b)
            inside, at = in_m & (k < K)[None, :], row * K + k[None, :]
            tile_q = tl.reshape(tl.load(q + at, mask=inside, other=0), (BLOCK_MX, BLOCKS, BLOCK_MX))
            folded = fold_tile(tile_q, byte, scale, 2, HW_CAST)
            tl.store(qf + at, tl.reshape(folded, (BLOCK_MX, BLOCK_K)), mask=inside)
        tl.store(apart + line + word, bits)
