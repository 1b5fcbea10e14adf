"""What a fold takes from a tensor: its values that become zero, and those that lose bits.

    q (R, K), sf (R, K/32), target (R, K/32) --count_fold_loss--> nonzero (R,), rounded (R,), flushed (R,)

A block under scale byte sf that is folded under the byte `target` has its values shifted down by target - sf octaves.
E4M3 holds such a value exactly until it meets the subnormals, 2^-9 apart:

    shift     0 ........................ up to 2^-6 .............. below
    value     the same under its scale   rounded to k * 2^-9       flushed to zero

The target is the caller's, so one kernel serves every fold: of rows, of spans of tokens (fold_groups), or none yet
written. Sums are per row in 32 bits: a tensor has more values than these hold, and no sum is shared between programs.
"""

import math

import triton
import triton.language as tl

from .formats import BLOCK, E4M3_NAN, E8M0_NAN
from .launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from .mx_math import BLOCK_MX, e4m3_to_f32, f32_to_e4m3
from .tiles import cdiv, hw_cast, tiles

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)
NAN_CODE: tl.constexpr = tl.constexpr(E4M3_NAN)


@triton.jit
def _count_kernel(
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
        # 448 * 2^-32 rounds to zero; the factor is exact, and so is its product with a value
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


def _plan(q: ArrayType, sf: ArrayType, target: ArrayType, *, arch: str) -> Launch:
    op = "count_fold_loss"
    for name, array in (("q", q), ("sf", sf), ("target", target)):
        require_dtype(op, name, array, "uint8")
    require_rank(op, "q", q, 2, 3)
    *lead, k = q.shape
    require_multiple(op, "q", k, BLOCK, "last dim")
    require_shape(op, "sf", sf, (*lead, k // BLOCK), "one scale per 32 values of q's last dim")
    require_shape(op, "target", target, sf.shape, "one per scale of sf")
    out = (ArrayType(tuple(lead), "int32"),) * 3
    if arch == "cpu":
        return Launch(out, ())
    m, t = math.prod(lead), tiles(op, arch, row_width=k)
    return Launch(
        out=out,
        attrs=(),
        grid=(cdiv(m, t.m),),
        scalars={"M": m},
        meta={"K": k, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m, "BLOCK_K": t.k},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


count_fold_loss = KernelOp(
    "count_fold_loss", _count_kernel, ("q", "sf", "target"), ("nonzero", "rounded", "flushed"), (), _plan
)
