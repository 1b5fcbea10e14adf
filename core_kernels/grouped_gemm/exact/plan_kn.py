"""Grouped products of bf16 weights whose contraction dim comes first, (G, K, N): no transposed copy.

    out = lhs rhs[g]          input gradient with the weights of a linear layer, (G, out, in); product with weights
                              stored as ragged_dot and GPT-OSS keep them
    out = lhs rhs[g] + lhs2 rhs2[g]    one sum, rounded once: the gradient of one input of two weights

    lhs (M, K)   |  g0  |  g1 |  tail  |      rhs (G, K, N)      out (M, N)   | lhs rhs[0] | lhs rhs[1] | tail |

The tensor cores read either layout of a bf16 operand; FP8 operands need the contraction dim last.
"""

from ...dispatch import facts
from ...launch import ArrayType, Call, KernelOp, Signature, Tiling, require_dtype, require_rank, require_shape
from .plan import CLEAR_REST, ENDS, check_ends, cuda_unsupported, rows_signature, tile_m_grouped


def _check_pair(op: str, number: str, lhs: ArrayType, rhs: ArrayType) -> None:
    for name, array, rank in ((f"lhs{number}", lhs, 2), (f"rhs{number}", rhs, 3)):
        require_dtype(op, name, array, "bfloat16")
        require_rank(op, name, array, rank)
    require_shape(
        op, f"lhs{number}", lhs, (lhs.shape[0], rhs.shape[1]), f"the contraction dim of rhs{number} (G, K, N)"
    )


def _signature(
    op: str, lhs: ArrayType, rhs: ArrayType, group_ends: ArrayType, out_dtype: str, clear_rest: bool
) -> Signature:
    check_ends(op, group_ends, rhs.shape[0])
    return rows_signature(op, lhs.shape[0], rhs.shape[2], out_dtype, clear_rest)


def _check(
    lhs: ArrayType, rhs: ArrayType, group_ends: ArrayType, *, out_dtype: str = "bfloat16", clear_rest: bool = True
) -> Signature:
    op = "grouped_mm_bf16_kn"
    _check_pair(op, "", lhs, rhs)
    return _signature(op, lhs, rhs, group_ends, out_dtype, clear_rest)


def _check_sum(
    lhs: ArrayType, rhs: ArrayType, lhs2: ArrayType, rhs2: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16", clear_rest: bool = True,
) -> Signature:  # fmt: skip
    op = "grouped_mm_bf16_kn_sum"
    _check_pair(op, "", lhs, rhs)
    require_shape(op, "lhs2", lhs2, lhs.shape, "the shape of lhs")
    require_shape(op, "rhs2", rhs2, rhs.shape, "the shape of rhs")
    _check_pair(op, "2", lhs2, rhs2)
    return _signature(op, lhs, rhs, group_ends, out_dtype, clear_rest)


def _tile(call: Call, arch: str) -> Tiling:
    unsupported = cuda_unsupported(N=call.out[0].shape[1], K=call.inputs[0].shape[1])
    return tile_m_grouped(call, arch, TCGEN05=facts(arch).tcgen05)._replace(cuda_unsupported=unsupported)


grouped_mm_bf16_kn = KernelOp(
    "grouped_mm_bf16_kn",
    f"""Each group of rows times its weight matrix, bf16, the contraction dim of the weights first.

    Args:
        lhs: (M, K) bf16.
        rhs: (G, K, N) bf16.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g] for the group g of each row, summed in fp32 and rounded once.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> lhs, rhs = xp.ones((3, 2), dtype=xp.bfloat16), xp.ones((2, 2, 1), dtype=xp.bfloat16)
        >>> ops.grouped_mm_bf16_kn(lhs, rhs, xp.asarray([1, 2], dtype=xp.int32)).tolist()
        [[2.0], [2.0], [0.0]]
    """,
    ("lhs", "rhs", "group_ends"),
    ("out",),
    _check,
    _tile,
    "grouped_gemm.exact.kernel_kn:mm_kernel",
)
grouped_mm_bf16_kn_sum = KernelOp(
    "grouped_mm_bf16_kn_sum",
    f"""The sum of two `grouped_mm_bf16_kn` products, rounded once: the input gradient of two weights with one input.

    Args:
        lhs: (M, K) bf16.
        rhs: (G, K, N) bf16.
        lhs2: (M, K) bf16.
        rhs2: (G, K, N) bf16.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g] + lhs2 rhs2[g] for the group g of each row.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> x, w = xp.ones((1, 2), dtype=xp.bfloat16), xp.ones((1, 2, 1), dtype=xp.bfloat16)
        >>> ops.grouped_mm_bf16_kn_sum(x, w, x, 2 * w, xp.asarray([1], dtype=xp.int32)).tolist()
        [[6.0]]
    """,
    ("lhs", "rhs", "lhs2", "rhs2", "group_ends"),
    ("out",),
    _check_sum,
    _tile,
    "grouped_gemm.exact.kernel_kn:mm_sum_kernel",
)
