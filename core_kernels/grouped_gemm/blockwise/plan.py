"""Grouped products of blockwise FP8: fp32 scales per row and 128 of K on the left, per square of 128 on the right.

    lhs (M, K), scales (M, K/128)  x  rhs_t (G, N, K), scales (G, N/128, K/128)  -> out (M, N)

                E4M3 x E4M3 --tensor core, 128 terms--> partial sum --* lhs_sf rhs_sf, + fp32--> sum --> out

`quantize_blockwise` and `quantize_squares` make such operands. Input gradients multiply the transposed weights, whose
bytes and scales are the transposed bytes and scales.
"""

from ...formats import BLOCK, SQUARE
from ...launch import (
    ArrayType,
    KernelOp,
    Signature,
    fail,
    require_dtype,
    require_multiple,
    require_rank,
    require_shape,
)
from ...tiles import cdiv
from ..exact.plan import CLEAR_REST, ENDS, check_m_grouped, tile_m_grouped
from ..folded.plan import COLUMNS


def _check(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16", clear_rest: bool = True,
) -> Signature:  # fmt: skip
    op = "grouped_mm_blockwise"
    _check_operands(op, lhs_q, lhs_sf, rhs_q, rhs_sf)
    return check_m_grouped(op, lhs_q, rhs_q, group_ends, out_dtype, clear_rest)


def _check_sum(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType,
    lhs2_q: ArrayType, lhs2_sf: ArrayType, rhs2_q: ArrayType, rhs2_sf: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16", clear_rest: bool = True,
) -> Signature:  # fmt: skip
    op = "grouped_mm_blockwise_sum"
    _check_operands(op, lhs_q, lhs_sf, rhs_q, rhs_sf)
    for name, array, first in (
        ("lhs2_q", lhs2_q, lhs_q), ("lhs2_sf", lhs2_sf, lhs_sf), ("rhs2_q", rhs2_q, rhs_q), ("rhs2_sf", rhs2_sf, rhs_sf)
    ):  # fmt: skip
        require_dtype(op, name, array, first.dtype)
        require_shape(op, name, array, first.shape, f"the shape of {name.replace('2', '')}")
    return check_m_grouped(op, lhs_q, rhs_q, group_ends, out_dtype, clear_rest)


def _check_operands(op: str, lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType) -> None:
    for name, array, dtype, rank in (
        ("lhs_q", lhs_q, "uint8", 2), ("lhs_sf", lhs_sf, "float32", 2),
        ("rhs_q", rhs_q, "uint8", 3), ("rhs_sf", rhs_sf, "float32", 3),
    ):  # fmt: skip
        require_dtype(op, name, array, dtype)
        require_rank(op, name, array, rank)
    (m, k), (groups, n, _) = lhs_q.shape, rhs_q.shape
    require_shape(op, "rhs_q", rhs_q, (groups, n, k), "the contraction dim of lhs_q")
    require_multiple(op, "lhs_q", k, BLOCK, "K", "pad the contraction dim with zeros")
    if k == 0:
        fail(ValueError, op, "lhs_q", "K = 0", f"allowed: multiples of {BLOCK} from {BLOCK}")
    require_multiple(op, "rhs_q", n, COLUMNS, "N", "pad the rows of the weights")
    require_shape(op, "lhs_sf", lhs_sf, (m, cdiv(k, SQUARE)), "one scale per row and 128 of K")
    squares = groups, cdiv(n, SQUARE), cdiv(k, SQUARE)
    require_shape(op, "rhs_sf", rhs_sf, squares, "one scale per square of 128 x 128 values of rhs_q")


grouped_mm_blockwise = KernelOp(
    "grouped_mm_blockwise",
    f"""Each group of rows times its weight matrix, E4M3 operands with fp32 scales per 128 of K.

    Args:
        lhs_q: (M, K) E4M3 as uint8.
        lhs_sf: (M, ceil(K/128)) fp32, from `quantize_blockwise`.
        rhs_q: (G, N, K) E4M3 as uint8.
        rhs_sf: (G, ceil(N/128), ceil(K/128)) fp32, from `quantize_squares`. K is a positive multiple of 32 and N a
            multiple of 8. The product of two scales is an fp32 number: beyond its range it is infinite or zero.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g]^T for the group g of each row. The sums of 128 terms are multiplied by their two scales
        and added in fp32, and rounded once.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> q, w = xp.full((1, 256), 0x38, dtype=xp.uint8), xp.full((1, 8, 256), 0x38, dtype=xp.uint8)  # 1.0
        >>> sf, w_sf, ends = xp.asarray([[1.0, 0.5]]), xp.asarray([[[3.0, 2.0]]]), xp.asarray([1], dtype=xp.int32)
        >>> ops.grouped_mm_blockwise(q, sf, w, w_sf, ends)[0, 0].item()  # 128 * 3 + 128
        512.0

    Source:
        DeepSeek-V3 Technical Report, section 3.3.2.
    """,
    ("lhs_q", "lhs_sf", "rhs_q", "rhs_sf", "group_ends"),
    ("out",),
    _check,
    tile_m_grouped,
    "grouped_gemm.blockwise.kernel:mm_kernel",
)
grouped_mm_blockwise_sum = KernelOp(
    "grouped_mm_blockwise_sum",
    f"""The sum of two `grouped_mm_blockwise` products, rounded once: the input gradient of two weights with one input.

    Args:
        lhs_q: (M, K) E4M3 as uint8.
        lhs_sf: (M, ceil(K/128)) fp32, as for `grouped_mm_blockwise`.
        rhs_q: (G, N, K) E4M3 as uint8.
        rhs_sf: (G, ceil(N/128), ceil(K/128)) fp32, as for `grouped_mm_blockwise`.
        lhs2_q: (M, K).
        lhs2_sf: (M, ceil(K/128)).
        rhs2_q: (G, N, K).
        rhs2_sf: (G, ceil(N/128), ceil(K/128)): the same for the second product.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g]^T + lhs2 rhs2[g]^T for the group g of each row: one fp32 sum over both products.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> q, w = xp.full((1, 128), 0x38, dtype=xp.uint8), xp.full((1, 8, 128), 0x38, dtype=xp.uint8)  # 1.0
        >>> sf, w_sf, ends = xp.ones((1, 1)), xp.ones((1, 1, 1)), xp.asarray([1], dtype=xp.int32)
        >>> ops.grouped_mm_blockwise_sum(q, sf, w, w_sf, q, sf, w, w_sf * 2, ends)[0, 0].item()  # 128 + 256
        384.0
    """,
    ("lhs_q", "lhs_sf", "rhs_q", "rhs_sf", "lhs2_q", "lhs2_sf", "rhs2_q", "rhs2_sf", "group_ends"),
    ("out",),
    _check_sum,
    tile_m_grouped,
    "grouped_gemm.blockwise.kernel:mm_sum_kernel",
)
