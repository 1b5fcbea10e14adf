"""Both operands of an activation of recipe "fp8_blockwise" with FP8 weight gradients, from one read.

    x (M, K), group_ends (G,) --quantize_blockwise_fold--> q (M, K), sf (M, K/128)       operand of out = x w^T
                                                           qf_t (K, M), span_sf (S, K)   operand of dw = dout^T x

Columns are as in `quantize_both_fold`, by the same CUDA kernel, whose tiles of bf16 are one block of 128 columns wide:
a row needs nothing of another tile. The separate ops read x twice and the column codes once more: 9 bytes per value
instead of 4. Results are bitwise equal to the separate ops. There is no Triton kernel: where neither CUDA C++ nor C++
runs, and for fp32 on a GPU, the op is composed of them.
"""

from collections.abc import Callable
from typing import Any

from ...formats import BLOCK, spans
from ...launch import ArrayType, Call, KernelOp, Signature, Tiling, fail, require_dtype, require_multiple, require_rank
from ...quantize import plan as quantize
from ...quantize import plan_blockwise as blockwise
from ...quantize.plan import FLOATS
from ...quantize.plan_blockwise import POWER_OF_TWO
from ..plan import fold_groups
from .plan import POLLS


def _check(x: ArrayType, group_ends: ArrayType, *, power_of_two: bool = False) -> Signature:
    op = "quantize_blockwise_fold"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2)
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    m, k = x.shape
    require_multiple(op, "x", m, BLOCK, "dim 0", "pad the groups, see `row_map`")
    require_multiple(op, "x", k, BLOCK, "last dim")
    if k == 0:
        fail(ValueError, op, "x", "K = 0", f"allowed: multiples of {BLOCK} from {BLOCK}")
    rows = blockwise.row_types(op, x.shape, power_of_two)
    tokens = ArrayType((k, m), "uint8"), ArrayType((spans(m, group_ends.shape[0]), k), "uint8")
    return Signature(rows.out + tokens, rows.attrs, tokens=(m, BLOCK))


def _tile(call: Call, arch: str) -> Tiling:  # one tile size on every architecture
    x, group_ends = call.inputs
    m, k = x.shape
    scratch = ArrayType((2 * spans(m, group_ends.shape[0]) * k,), "uint8")  # the maxima of spans, twice
    unsupported = "" if x.dtype == "bfloat16" else "allowed: bfloat16; a tile of fp32 is half a block wide"
    return Tiling(scratch=(scratch,), cuda_attrs=(POLLS,), cuda_unsupported=unsupported)


def _compose(call: Callable[..., tuple[Any, ...]], x: Any, group_ends: Any, **options: Any) -> tuple[Any, ...]:
    rows = call(blockwise.quantize_blockwise, x, group_ends, **options)
    return *rows, *call(fold_groups, *call(quantize.quantize_col, x), group_ends)


quantize_blockwise_fold = KernelOp(
    "quantize_blockwise_fold",
    f"""`quantize_blockwise` of x, and `fold_groups` of its `quantize_col`, in one read of x.

    Args:
        x: (M, K) bf16 or fp32, M and K multiples of 32, K positive.
        group_ends: (G,) int32, where each group ends along M: non-decreasing multiples of 32.
        {POWER_OF_TWO}

    Returns:
        q (M, K) E4M3 as uint8 and sf (M, ceil(K/128)) fp32; qf_t (K, M) and span_sf (M // 256 + G, K), uint8. Rows of q
        and sf, and columns of qf_t, past the last end are unspecified.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> x = xp.asarray([[4.0] * 64] + [[1.0] * 64] * 31)
        >>> q, sf, qf_t, span_sf = ops.quantize_blockwise_fold(x, xp.asarray([32], dtype=xp.int32), power_of_two=True)
        >>> sf[:2].tolist(), span_sf[:, 0].tolist()  # 127 - 6 = 121, plus three octaves
        ([[0.015625], [0.00390625]], [124])
    """,
    ("x", "group_ends"),
    ("q", "sf", "qf_t", "span_sf"),
    _check,
    _tile,
    compose=_compose,
)
