"""Grouped products at the FP8 tensor-core rate: no scale per block, one power of two per row after the sums.

    M-grouped   lhs (M, K), scales (M,)    x  rhs_t (G, N, K), scales (G, N)  -> out (M, N), bias (G, N) or none
    K-grouped   lhs_t (N, M), scales (S, N)  x  rhs_t (K, M), scales (S, K)   -> out (G, N, K)

                E4M3 x E4M3 --tensor core, 128 terms--> partial sum --+ fp32--> sum --* 2^(a + b) [+ bias]--> out

    Sum         an M-grouped product of two pairs of operands: both products of a row in one sum, rounded once

Operands are folded: by fold_rows for the first product, by fold_groups for the second. Along the contraction dim of the
second, every group ends at a multiple of 32 and has a scale for each span of 256 tokens, none smaller than the one
before:

    tokens of a group   | span 0  | span 1  | span 2 |
    scale of a row      2^a       2^a       2^(a+3)         the sum so far * 2^-3, then the products of span 2
                                                            the sum * 2^(a+3) at the end

Rows past the last end are zeros or, without `clear_rest`, unspecified; nothing reads them. The weight gradient of an
empty group is zero. On a GPU the host does not check ends. If an end is no multiple of 32, the weight gradients of the
groups on both sides of it are NaN in every element. So are the weight gradients of groups that end before they begin or
beyond M.
"""

from ...formats import BLOCK, spans
from ...launch import (
    ArrayType,
    Call,
    KernelOp,
    Signature,
    Tiling,
    fail,
    require_dtype,
    require_multiple,
    require_rank,
    require_shape,
)
from ..exact.plan import CLEAR_REST, ENDS, check_k_grouped, check_m_grouped, tile_k_grouped, tile_m_grouped

COLUMNS = 8
"""Columns of `out` are a multiple: the sm_90 kernel stores rows of whole 16 bytes."""


def _check_bytes(op: str, **arrays: ArrayType) -> None:
    for name, array in arrays.items():
        require_dtype(op, name, array, "uint8")


def _check_contraction(op: str, name: str, qf: ArrayType, rank: int, what: str) -> None:
    require_rank(op, name, qf, rank)
    require_multiple(op, name, qf.shape[-1], BLOCK, what)


def check_codes(op: str, lhs_qf: ArrayType, rhs_qf: ArrayType, number: str = "") -> None:
    """Raise unless these are the codes of an M-grouped product. number: of the pair, as in their names."""
    lhs, rhs = f"lhs{number}_qf", f"rhs{number}_qf"
    _check_bytes(op, **{lhs: lhs_qf, rhs: rhs_qf})
    _check_contraction(op, lhs, lhs_qf, 2, "K")
    _check_contraction(op, rhs, rhs_qf, 3, "K")
    require_shape(op, lhs, lhs_qf, (lhs_qf.shape[0], rhs_qf.shape[2]), f"the contraction dim of {rhs}")
    if lhs_qf.shape[1] == 0:
        fail(ValueError, op, lhs, "K = 0", f"allowed: multiples of {BLOCK} from {BLOCK}")
    require_multiple(op, rhs, rhs_qf.shape[1], COLUMNS, "N", "pad the rows of the weights")


def check_operands(
    op: str, lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType, number: str = ""
) -> None:
    """Raise unless these are the operands of an M-grouped product with a scale per row. number: as in `check_codes`."""
    lhs, rhs = f"lhs{number}_qf", f"rhs{number}_qf"
    scales = {f"lhs{number}_sf": lhs_sf, f"rhs{number}_sf": rhs_sf}
    _check_bytes(op, **scales)
    check_codes(op, lhs_qf, rhs_qf, number)
    for (name, scale), operand, of in zip(scales.items(), (lhs_qf, rhs_qf), (lhs, rhs), strict=True):
        require_shape(op, name, scale, operand.shape[:-1], f"one scale per row of {of}")


def _check_mm(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16", clear_rest: bool = True,
) -> Signature:  # fmt: skip
    op = "grouped_mm_fold"
    check_operands(op, lhs_qf, lhs_sf, rhs_qf, rhs_sf)
    return check_m_grouped(op, lhs_qf, rhs_qf, group_ends, out_dtype, clear_rest)


def _check_mm_bias(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType, bias: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16", clear_rest: bool = True,
) -> Signature:  # fmt: skip
    op = "grouped_mm_fold_bias"
    check_operands(op, lhs_qf, lhs_sf, rhs_qf, rhs_sf)
    require_dtype(op, "bias", bias, "float32")
    require_shape(op, "bias", bias, rhs_qf.shape[:2], "one value per row of rhs_qf")
    return check_m_grouped(op, lhs_qf, rhs_qf, group_ends, out_dtype, clear_rest)


def _check_mm_sum(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType,
    lhs2_qf: ArrayType, lhs2_sf: ArrayType, rhs2_qf: ArrayType, rhs2_sf: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16", clear_rest: bool = True,
) -> Signature:  # fmt: skip
    op = "grouped_mm_fold_sum"
    check_operands(op, lhs_qf, lhs_sf, rhs_qf, rhs_sf)
    check_operands(op, lhs2_qf, lhs2_sf, rhs2_qf, rhs2_sf, "2")
    require_shape(op, "lhs2_qf", lhs2_qf, (lhs_qf.shape[0], lhs2_qf.shape[1]), "the rows of lhs_qf")
    require_shape(op, "rhs2_qf", rhs2_qf, (*rhs_qf.shape[:2], rhs2_qf.shape[2]), "the G and N of rhs_qf")
    return check_m_grouped(op, lhs_qf, rhs_qf, group_ends, out_dtype, clear_rest)


def _check_wgrad(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16",
) -> Signature:  # fmt: skip
    return check_wgrad_operands("grouped_wgrad_fold", lhs_qf, lhs_sf, rhs_qf, rhs_sf, group_ends, out_dtype)


def check_wgrad_operands(
    op: str, lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    out_dtype: str,
) -> Signature:  # fmt: skip
    """Signature of a K-grouped product."""
    _check_bytes(op, lhs_qf=lhs_qf, lhs_sf=lhs_sf, rhs_qf=rhs_qf, rhs_sf=rhs_sf)
    _check_contraction(op, "lhs_qf", lhs_qf, 2, "tokens")
    require_rank(op, "rhs_qf", rhs_qf, 2)
    (n, m), k = lhs_qf.shape, rhs_qf.shape[0]
    require_shape(op, "rhs_qf", rhs_qf, (k, m), "the tokens of lhs_qf (N, M)")
    require_multiple(op, "rhs_qf", k, COLUMNS, "K", "pad the rows of rhs_qf")
    signature = check_k_grouped(op, m, n, k, group_ends, out_dtype, BLOCK)
    slots = spans(m, group_ends.shape[0])
    require_shape(op, "lhs_sf", lhs_sf, (slots, n), "one scale per span and row of lhs_qf")
    require_shape(op, "rhs_sf", rhs_sf, (slots, k), "one scale per span and row of rhs_qf")
    return signature


def _tile_mm_sum(call: Call, arch: str) -> Tiling:
    tiling = tile_m_grouped(call, arch)
    return tiling._replace(meta={**tiling.meta, "K2": call.inputs[4].shape[1]})


def _tile_wgrad(call: Call, arch: str) -> Tiling:
    return tile_k_grouped(call, arch, call.inputs[0].shape[1])


_INPUTS = ("lhs_qf", "lhs_sf", "rhs_qf", "rhs_sf", "group_ends")
grouped_mm_fold = KernelOp(
    "grouped_mm_fold",
    f"""Each group of rows times its weight matrix, E4M3 operands with one scale per row.

    Args:
        lhs_qf: (M, K) E4M3.
        lhs_sf: (M,) E8M0.
        rhs_qf: (G, N, K) E4M3.
        rhs_sf: (G, N) E8M0. All uint8; K is a positive multiple of 32 and N a multiple of 8. `fold_rows`,
            `quantize_row_fold` and `quantize_rowwise` make such operands.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g]^T for the group g of each row, rounded once. Sums are fp32; Hopper's tensor cores sum
        128 terms of K, and these sums are added in fp32.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> qf, row_sf = ops.quantize_rowwise(xp.ones((1, 32)))
        >>> w, w_sf = ops.quantize_rowwise(xp.ones((1, 8, 32)))
        >>> ops.grouped_mm_fold(qf, row_sf, w, w_sf, xp.asarray([1], dtype=xp.int32))[0, 0].item()
        32.0
    """,
    _INPUTS,
    ("out",),
    _check_mm,
    tile_m_grouped,
    "grouped_gemm.folded.kernel:mm_kernel",
)
grouped_mm_fold_bias = KernelOp(
    "grouped_mm_fold_bias",
    f"""`grouped_mm_fold` plus a bias per group, added to the fp32 sums before the one rounding.

    Args:
        lhs_qf: (M, K) E4M3, as for `grouped_mm_fold`.
        lhs_sf: (M,) E8M0, as for `grouped_mm_fold`.
        rhs_qf: (G, N, K) E4M3, as for `grouped_mm_fold`.
        rhs_sf: (G, N) E8M0, as for `grouped_mm_fold`.
        bias: (G, N) fp32.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g]^T + bias[g] for the group g of each row.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> qf, row_sf = ops.quantize_rowwise(xp.ones((1, 32)))
        >>> w, w_sf = ops.quantize_rowwise(xp.ones((1, 8, 32)))
        >>> bias, ends = xp.ones((1, 8)), xp.asarray([1], dtype=xp.int32)
        >>> ops.grouped_mm_fold_bias(qf, row_sf, w, w_sf, bias, ends)[0, 0].item()
        33.0
    """,
    (*_INPUTS[:-1], "bias", "group_ends"),
    ("out",),
    _check_mm_bias,
    tile_m_grouped,
    "grouped_gemm.folded.kernel:mm_bias_kernel",
)
grouped_mm_fold_sum = KernelOp(
    "grouped_mm_fold_sum",
    f"""The sum of two `grouped_mm_fold` products, rounded once: the input gradient of two weights with one input.

    Args:
        lhs_qf: (M, K) E4M3, as for `grouped_mm_fold`.
        lhs_sf: (M,) E8M0, as for `grouped_mm_fold`.
        rhs_qf: (G, N, K) E4M3, as for `grouped_mm_fold`.
        rhs_sf: (G, N) E8M0, as for `grouped_mm_fold`.
        lhs2_qf: (M, K2).
        lhs2_sf: (M,).
        rhs2_qf: (G, N, K2).
        rhs2_sf: (G, N): the same for the second product. All uint8; K and K2 are positive multiples of 32.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g]^T + lhs2 rhs2[g]^T for the group g of each row.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> ones, sf = xp.full((1, 32), 0x38, dtype=xp.uint8), xp.full((1,), 127, dtype=xp.uint8)  # 1.0
        >>> w, w_sf = xp.full((1, 8, 32), 0x38, dtype=xp.uint8), xp.full((1, 8), 127, dtype=xp.uint8)
        >>> ends = xp.asarray([1], dtype=xp.int32)
        >>> ops.grouped_mm_fold_sum(ones, sf, w, w_sf, ones, sf, w, w_sf + 1, ends)[0, 0].item()  # 32 + 64
        96.0
    """,
    (*_INPUTS[:-1], "lhs2_qf", "lhs2_sf", "rhs2_qf", "rhs2_sf", "group_ends"),
    ("out",),
    _check_mm_sum,
    _tile_mm_sum,
    "grouped_gemm.folded.kernel:mm_sum_kernel",
)
grouped_wgrad_fold = KernelOp(
    "grouped_wgrad_fold",
    """The weight gradient of each group, E4M3 operands with one scale per row and span of 256 tokens.

    Args:
        lhs_qf: (N, M) E4M3.
        lhs_sf: (M // 256 + G, N) E8M0.
        rhs_qf: (K, M) E4M3.
        rhs_sf: (M // 256 + G, K) E8M0. All uint8, as `fold_groups` makes them with the same ends; M, the tokens, is a
            multiple of 32 and K of 8.
        group_ends: (G,) int32, where each group ends along M: non-decreasing multiples of 32, up to M.
        out_dtype: "bfloat16" or "float32".

    Returns:
        out (G, N, K) = lhs rhs^T over the tokens of each group, rounded once; zeros for an empty group.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> ones, sf = xp.full((8, 32), 0x38, dtype=xp.uint8), xp.full((1, 8), 127, dtype=xp.uint8)  # 1.0
        >>> ops.grouped_wgrad_fold(ones, sf, ones, sf, xp.asarray([32], dtype=xp.int32))[0, 0, 0].item()
        32.0
    """,
    _INPUTS,
    ("out",),
    _check_wgrad,
    _tile_wgrad,
    "grouped_gemm.folded.kernel:wgrad_kernel",
)
