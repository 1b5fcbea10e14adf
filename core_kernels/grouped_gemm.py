"""Grouped matrix products, one weight matrix per expert, exact path: products of dequantized values.

    M-grouped   lhs (M, K) x rhs_t (G, N, K) -> out (M, N)       forward; input gradient with the weights
                                                                 quantized along N
    K-grouped   lhs_t (N, M) x rhs_t (K, M)  -> out (G, N, K)    weight gradient, split along M

Operands are MXFP8 (q and sf, scaled along the contraction dim, which is the contiguous one) or bf16.
`group_ends` (G,) holds where each group ends along M; it is read on the device. Rows past the last
end are written as zeros, an empty group's weight gradient is zero, and no padding row is read into a
real one. The bf16 K-grouped product reads lhs (M, N) and rhs (M, K) as they lie.
"""

from .formats import BLOCK
from .launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape

OUT_DTYPES = ("bfloat16", "float32")


def _check_ends(op: str, group_ends: ArrayType, groups: int | None) -> None:
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    if groups is not None:
        require_shape(op, "group_ends", group_ends, (groups,), "one end per group of the weights")


def _check_mx(op: str, name: str, q: ArrayType, sf: ArrayType, rank: int) -> None:
    require_dtype(op, f"{name}_q", q, "uint8")
    require_dtype(op, f"{name}_sf", sf, "uint8")
    require_rank(op, f"{name}_q", q, rank)
    require_multiple(op, f"{name}_q", q.shape[-1], BLOCK, "contraction dim")
    require_shape(op, f"{name}_sf", sf, (*q.shape[:-1], q.shape[-1] // BLOCK), f"one scale per 32 values of {name}_q")


def _m_grouped(op: str, lhs: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, out_dtype: str) -> Launch:
    g, n, k = rhs_t.shape
    require_shape(op, "lhs", lhs, (lhs.shape[0], k), "the contraction dim of rhs_t (G, N, K)")
    _check_ends(op, group_ends, g)
    out = ArrayType((lhs.shape[0], n), out_dtype)
    require_dtype(op, "out_dtype", out, *OUT_DTYPES)
    return Launch(out=(out,), attrs=())


def _k_grouped(op: str, n: int, k: int, group_ends: ArrayType, out_dtype: str) -> Launch:
    _check_ends(op, group_ends, None)
    out = ArrayType((group_ends.shape[0], n, k), out_dtype)
    require_dtype(op, "out_dtype", out, *OUT_DTYPES)
    return Launch(out=(out,), attrs=())


def _plan_mm_mx(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    _check_mx("grouped_mm_mx", "lhs", lhs_q, lhs_sf, 2)
    _check_mx("grouped_mm_mx", "rhs", rhs_q, rhs_sf, 3)
    return _m_grouped("grouped_mm_mx", lhs_q, rhs_q, group_ends, out_dtype)


def _plan_mm_bf16(
    lhs: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, *, arch: str, out_dtype: str = "bfloat16"
) -> Launch:
    require_dtype("grouped_mm_bf16", "lhs", lhs, "bfloat16")
    require_dtype("grouped_mm_bf16", "rhs_t", rhs_t, "bfloat16")
    require_rank("grouped_mm_bf16", "lhs", lhs, 2)
    require_rank("grouped_mm_bf16", "rhs_t", rhs_t, 3)
    return _m_grouped("grouped_mm_bf16", lhs, rhs_t, group_ends, out_dtype)


def _plan_wgrad_mx(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    op = "grouped_wgrad_mx"
    _check_mx(op, "lhs", lhs_q, lhs_sf, 2)
    _check_mx(op, "rhs", rhs_q, rhs_sf, 2)
    require_shape(op, "rhs_q", rhs_q, (rhs_q.shape[0], lhs_q.shape[1]), "the tokens of lhs_q (N, M)")
    return _k_grouped(op, lhs_q.shape[0], rhs_q.shape[0], group_ends, out_dtype)


def _plan_wgrad_bf16(
    lhs: ArrayType, rhs: ArrayType, group_ends: ArrayType, *, arch: str, out_dtype: str = "bfloat16"
) -> Launch:
    op = "grouped_wgrad_bf16"
    require_dtype(op, "lhs", lhs, "bfloat16")
    require_dtype(op, "rhs", rhs, "bfloat16")
    require_rank(op, "lhs", lhs, 2)
    require_rank(op, "rhs", rhs, 2)
    require_shape(op, "rhs", rhs, (lhs.shape[0], rhs.shape[1]), "the tokens of lhs (M, N)")
    return _k_grouped(op, lhs.shape[1], rhs.shape[1], group_ends, out_dtype)


_MX_INPUTS = ("lhs_q", "lhs_sf", "rhs_q", "rhs_sf", "group_ends")
grouped_mm_mx = KernelOp("grouped_mm_mx", None, _MX_INPUTS, ("out",), (), _plan_mm_mx)
grouped_mm_bf16 = KernelOp("grouped_mm_bf16", None, ("lhs", "rhs_t", "group_ends"), ("out",), (), _plan_mm_bf16)
grouped_wgrad_mx = KernelOp("grouped_wgrad_mx", None, _MX_INPUTS, ("out",), (), _plan_wgrad_mx)
grouped_wgrad_bf16 = KernelOp("grouped_wgrad_bf16", None, ("lhs", "rhs", "group_ends"), ("out",), (), _plan_wgrad_bf16)
