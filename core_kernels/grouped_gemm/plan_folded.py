"""Grouped products at the FP8 tensor-core rate: no scale per block, one power of two per row after the sums.

    M-grouped   lhs (M, K), scales (M,)    x  rhs_t (G, N, K), scales (G, N)  -> out (M, N), bias (G, N) or none
    K-grouped   lhs_t (N, M), scales (S, N)  x  rhs_t (K, M), scales (S, K)   -> out (G, N, K)

                E4M3 x E4M3 --tensor core, 128 terms--> partial sum --+ fp32--> sum --* 2^(a + b) [+ bias]--> out

Operands are folded: fold_rows gives those of the first, fold_groups those of the second, along whose
contraction dim every group ends at a multiple of 32 and has a scale of its own for each span of 256 tokens, none
smaller than the one before:

    tokens of a group   | span 0  | span 1  | span 2 |
    scale of a row      2^a       2^a       2^(a+3)         the sum so far * 2^-3, then the products of span 2
                                                            the sum * 2^(a+3) at the end

Rows past the last end are written as zeros, an empty group's weight gradient is zero, and no padding row is read into
a real one. On a GPU nobody looks at ends: the weight gradients of the groups on both sides of one that is no multiple
of 32 are NaN in every element, and so are those of groups that end before they begin or beyond M.
"""

from ..formats import BLOCK, spans
from ..launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_multiple, require_rank, require_shape
from . import kernel_folded as kernel
from .plan import plan_k_grouped, plan_m_grouped

COLUMNS = 8
"""Columns of `out` are a multiple: the sm_90 kernel stores rows 16 bytes at a time."""


def _check_bytes(op: str, **arrays: ArrayType) -> None:
    for name, array in arrays.items():
        require_dtype(op, name, array, "uint8")


def _check_contraction(op: str, name: str, qf: ArrayType, rank: int, what: str) -> None:
    require_rank(op, name, qf, rank)
    require_multiple(op, name, qf.shape[-1], BLOCK, what)


def _check_mm(op: str, lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType) -> None:
    _check_bytes(op, lhs_qf=lhs_qf, lhs_sf=lhs_sf, rhs_qf=rhs_qf, rhs_sf=rhs_sf)
    _check_contraction(op, "lhs_qf", lhs_qf, 2, "K")
    _check_contraction(op, "rhs_qf", rhs_qf, 3, "K")
    require_shape(op, "lhs_qf", lhs_qf, (lhs_qf.shape[0], rhs_qf.shape[2]), "the contraction dim of rhs_qf")
    if lhs_qf.shape[1] == 0:
        fail(ValueError, op, "lhs_qf", "K = 0", f"allowed: multiples of {BLOCK} from {BLOCK}")
    require_multiple(op, "rhs_qf", rhs_qf.shape[1], COLUMNS, "N", "pad the rows of the weights")
    require_shape(op, "lhs_sf", lhs_sf, lhs_qf.shape[:1], "one scale per row of lhs_qf")
    require_shape(op, "rhs_sf", rhs_sf, rhs_qf.shape[:2], "one scale per row of rhs_qf")


def _plan_mm(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    op = "grouped_mm_fold"
    _check_mm(op, lhs_qf, lhs_sf, rhs_qf, rhs_sf)
    return plan_m_grouped(op, arch, lhs_qf, rhs_qf, group_ends, out_dtype)


def _plan_mm_bias(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType, bias: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    op = "grouped_mm_fold_bias"
    _check_mm(op, lhs_qf, lhs_sf, rhs_qf, rhs_sf)
    require_dtype(op, "bias", bias, "float32")
    require_shape(op, "bias", bias, rhs_qf.shape[:2], "one value per row of rhs_qf")
    return plan_m_grouped(op, arch, lhs_qf, rhs_qf, group_ends, out_dtype)


def _plan_wgrad(
    lhs_qf: ArrayType, lhs_sf: ArrayType, rhs_qf: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    op = "grouped_wgrad_fold"
    _check_bytes(op, lhs_qf=lhs_qf, lhs_sf=lhs_sf, rhs_qf=rhs_qf, rhs_sf=rhs_sf)
    _check_contraction(op, "lhs_qf", lhs_qf, 2, "tokens")
    require_rank(op, "rhs_qf", rhs_qf, 2)
    n, m = lhs_qf.shape
    k = rhs_qf.shape[0]
    require_shape(op, "rhs_qf", rhs_qf, (k, m), "the tokens of lhs_qf (N, M)")
    require_multiple(op, "rhs_qf", k, COLUMNS, "K", "pad the rows of rhs_qf")
    launch = plan_k_grouped(op, arch, m, n, k, group_ends, out_dtype)
    slots = spans(m, group_ends.shape[0])
    require_shape(op, "lhs_sf", lhs_sf, (slots, n), "one scale per span and row of lhs_qf")
    require_shape(op, "rhs_sf", rhs_sf, (slots, k), "one scale per span and row of rhs_qf")
    return launch


_INPUTS = ("lhs_qf", "lhs_sf", "rhs_qf", "rhs_sf", "group_ends")
grouped_mm_fold = KernelOp("grouped_mm_fold", kernel.mm_kernel, _INPUTS, ("out",), (), _plan_mm)
grouped_mm_fold_bias = KernelOp(
    "grouped_mm_fold_bias", kernel.mm_bias_kernel, (*_INPUTS[:-1], "bias", "group_ends"), ("out",), (), _plan_mm_bias
)
grouped_wgrad_fold = KernelOp("grouped_wgrad_fold", kernel.wgrad_kernel, _INPUTS, ("out",), (), _plan_wgrad)
