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

from ..formats import BLOCK
from ..launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from ..tiles import cdiv, hw_cast, tiles
from .kernel_loss import count_kernel


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
    "count_fold_loss", count_kernel, ("q", "sf", "target"), ("nonzero", "rounded", "flushed"), (), _plan
)
