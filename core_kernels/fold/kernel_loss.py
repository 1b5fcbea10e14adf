"""Triton kernel that counts the values that a fold rounds or flushes; plan_loss.py defines the counts."""

import triton
import triton.language as tl

from ..formats import E4M3_NAN, E8M0_NAN
from ..mx_math import BLOCK_MX, e4m3_to_f32, f32_to_e4m3

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)
NAN_CODE: tl.constexpr = tl.constexpr(E4M3_NAN)


@triton.jit
def count_kernel(
    q, sf, target, M, nonzero, rounded, flushed,
    K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK_MX
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pitch: tl.constexpr = K // BLOCK_MX
    values = tl.zeros((BLOCK_M,), tl.int32)
    changed, zeros = values, values
    for k0 in range(0, K, BLOCK_K):
        k, kb = tl.arange(0, BLOCK_K) + k0, tl.arange(0, BLOCKS) + k0 // BLOCK_MX
        in_q, in_sf = (m < M)[:, None] & (k < K)[None, :], (m < M)[:, None] & (kb < pitch)[None, :]
        q_tile = tl.load(q + m[:, None] * K + k[None, :], mask=in_q, other=0)
        at = m[:, None] * pitch + kb[None, :]
        byte = tl.load(sf + at, mask=in_sf, other=NAN_BYTE).to(tl.int32)
        under = tl.load(target + at, mask=in_sf, other=NAN_BYTE).to(tl.int32)
        # 448 * 2^-32 rounds to zero. The factor is exact, and so is its product with a value
        shift = tl.minimum(tl.maximum(byte - under, -32), 0)
        factor = ((127 + shift) << 23).to(tl.float32, bitcast=True)
        code = tl.reshape(q_tile, (BLOCK_M, BLOCKS, BLOCK_MX)) & 0x7F
        numbers = (code != 0) & (code != NAN_CODE) & ((byte != NAN_BYTE) & (under != NAN_BYTE))[:, :, None]
        value = e4m3_to_f32(code, HW_CAST) * factor[:, :, None]
        folded = e4m3_to_f32(f32_to_e4m3(value, HW_CAST), HW_CAST)
        values += tl.sum(tl.sum(numbers.to(tl.int32), 2), 1)
        changed += tl.sum(tl.sum((numbers & (folded != value) & (folded != 0)).to(tl.int32), 2), 1)
        zeros += tl.sum(tl.sum((numbers & (folded == 0)).to(tl.int32), 2), 1)
    tl.store(nonzero + m, values, mask=m < M)
    tl.store(rounded + m, changed, mask=m < M)
    tl.store(flushed + m, zeros, mask=m < M)
