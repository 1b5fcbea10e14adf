"""E4M3 under one power-of-two scale per row, straight from floats: the row is the block.

              |<----------------- K ----------------->|
    x         x0  x1  x2  ...                     xK-1    bf16 or fp32
              '-------- largest magnitude ------------'--> row_sf, one E8M0 byte
    qf        x0  x1  x2  ...                     xK-1    / 2^(row_sf - 127), rounded once to E4M3

`grouped_mm_fold` multiplies such rows. `quantize_row_fold` has the same scales of finite rows, but rounds first to
the block's scale and then to the row's, and a NaN spoils only its block there: here it spoils the row. A program
holds whole rows, since the scale is not known before the last value.
"""

import triton
import triton.language as tl

from .fold import whole_rows
from .formats import BLOCK, Rounding, scale_attrs
from .launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank
from .mx_math import quantize_blocks, to_f32
from .quantize import FLOATS


@triton.jit
def _rowwise_kernel(
    x, M, qf, row_sf,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, k = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    inside, at = (m < M)[:, None] & (k < K)[None, :], m[:, None] * K + k[None, :]
    v = to_f32(tl.load(x + at, mask=inside, other=0.0))
    q, sf = quantize_blocks(v, 1, rounding, satfinite, HW_CAST)
    tl.store(qf + at, q, mask=inside)
    tl.store(row_sf + m, sf, mask=m < M)


def _plan(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    op = "quantize_rowwise"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")  # what the products take
    return whole_rows(op, "x", arch, x.shape, scale_attrs(op, rounding, satfinite))


quantize_rowwise = KernelOp(
    "quantize_rowwise", _rowwise_kernel, ("x",), ("qf", "row_sf"), ("rounding", "satfinite"), _plan
)
