"""Grouped matrix products, one weight matrix per expert, exact path: products of dequantized values.

    M-grouped   lhs (M, K) x rhs_t (G, N, K) -> out (M, N)       forward; input gradient with the weights
                                                                 quantized along N
    K-grouped   lhs_t (N, M) x rhs_t (K, M)  -> out (G, N, K)    weight gradient, split along M

Operands are MXFP8 (q and sf, scaled along the contraction dim, which is the contiguous one) or bf16.
`group_ends` (G,) holds where each group ends along M; it is read on the device. Rows past the last
end are written as zeros, an empty group's weight gradient is zero, and no padding row is read into a
real one. The bf16 K-grouped product reads lhs (M, N) and rhs (M, K) too, as they lie, and takes any ends in order; the
MXFP8 one needs ends that are multiples of 32. On a GPU nobody looks at ends: the weight gradients of the groups on both
sides of one that is no such multiple are NaN in every element, and so are those of groups that end before they begin or
beyond M.
"""

import math
from collections.abc import Callable

from ..formats import BLOCK
from ..launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from ..tiles import Tiles, cdiv, hw_cast, next_power_of_2, tcgen05, tiles
from . import kernel

OUT_DTYPES = ("bfloat16", "float32")
CUDA_COLUMNS = 8
"""The CUDA kernel of bf16 operands moves rows 16 bytes at a time: their lengths are multiples of this."""


def check_ends(op: str, group_ends: ArrayType, groups: int | None) -> None:
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


def _check_bf16(op: str, **matrices: ArrayType) -> None:
    for name, matrix in matrices.items():
        require_dtype(op, name, matrix, "bfloat16")
        require_rank(op, name, matrix, 2)


def _launch(
    op: str, arch: str, out: ArrayType, m: int, n: int, k: int, num_tiles: Callable[[Tiles], int],
    not_in_cuda: str = "", **meta: int,
) -> Launch:  # fmt: skip
    """`num_tiles`: how many programs such tiles need; none where `out` has no bytes."""
    if arch == "cpu":
        return Launch((out,), ())
    t = tiles(op, arch)
    return Launch(
        out=(out,),
        attrs=(),
        grid=(num_tiles(t) if math.prod(out.shape) else 0,),
        scalars={"M": m},
        meta={
            "N": n, "K": k, "HW_CAST": hw_cast(arch), **meta, "BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_K": t.k,
        },
        num_warps=t.num_warps,
        num_stages=t.num_stages,
        not_in_cuda=not_in_cuda,
    )  # fmt: skip


def _not_in_cuda(**columns: int) -> str:
    """Why the lengths of the rows that the CUDA kernel reads and writes do not suit it."""
    for dim, size in columns.items():
        if size % CUDA_COLUMNS:
            return f"allowed: triton; its CUDA kernel takes {dim} in multiples of {CUDA_COLUMNS}, this is {size}"
    return ""


def plan_m_grouped(
    op: str, arch: str, lhs: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, out_dtype: str,
    not_in_cuda: str = "", **meta: bool,
) -> Launch:  # fmt: skip
    g, n, k = rhs_t.shape
    require_shape(op, "lhs", lhs, (lhs.shape[0], k), "the contraction dim of rhs_t (G, N, K)")
    check_ends(op, group_ends, g)
    out = ArrayType((lhs.shape[0], n), out_dtype)
    require_dtype(op, "out_dtype", out, *OUT_DTYPES)
    m = lhs.shape[0]

    def num_tiles(t: Tiles) -> int:
        """Every group may leave a partial tile, and so may the rows past the last end."""
        return (cdiv(m, t.m) + g) * cdiv(n, t.n)

    return _launch(op, arch, out, m, n, k, num_tiles, not_in_cuda, G=g, BLOCK_G=next_power_of_2(g + 1), **meta)


def plan_k_grouped(
    op: str, arch: str, m: int, n: int, k: int, group_ends: ArrayType, out_dtype: str,
    not_in_cuda: str = "", **meta: bool,
) -> Launch:  # fmt: skip
    check_ends(op, group_ends, None)
    groups = group_ends.shape[0]
    out = ArrayType((groups, n, k), out_dtype)
    require_dtype(op, "out_dtype", out, *OUT_DTYPES)
    return _launch(op, arch, out, m, n, k, lambda t: groups * cdiv(n, t.n) * cdiv(k, t.k), not_in_cuda, **meta)


def _plan_mm_mx(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    _check_mx("grouped_mm_mx", "lhs", lhs_q, lhs_sf, 2)
    _check_mx("grouped_mm_mx", "rhs", rhs_q, rhs_sf, 3)
    shape = lhs_q.shape[0], rhs_q.shape[2]
    require_shape("grouped_mm_mx", "lhs_q", lhs_q, shape, "the contraction dim of rhs_q")
    return plan_m_grouped("grouped_mm_mx", arch, lhs_q, rhs_q, group_ends, out_dtype, TCGEN05=tcgen05(arch))


def _plan_mm_bf16(
    lhs: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, *, arch: str, out_dtype: str = "bfloat16"
) -> Launch:
    require_dtype("grouped_mm_bf16", "lhs", lhs, "bfloat16")
    require_dtype("grouped_mm_bf16", "rhs_t", rhs_t, "bfloat16")
    require_rank("grouped_mm_bf16", "lhs", lhs, 2)
    require_rank("grouped_mm_bf16", "rhs_t", rhs_t, 3)
    absent = _not_in_cuda(N=rhs_t.shape[1], K=rhs_t.shape[2])
    return plan_m_grouped("grouped_mm_bf16", arch, lhs, rhs_t, group_ends, out_dtype, absent, TCGEN05=tcgen05(arch))


def _plan_wgrad_mx(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    op = "grouped_wgrad_mx"
    _check_mx(op, "lhs", lhs_q, lhs_sf, 2)
    _check_mx(op, "rhs", rhs_q, rhs_sf, 2)
    require_shape(op, "rhs_q", rhs_q, (rhs_q.shape[0], lhs_q.shape[1]), "the tokens of lhs_q (N, M)")
    (n, m), k = lhs_q.shape, rhs_q.shape[0]
    return plan_k_grouped(op, arch, m, n, k, group_ends, out_dtype, TCGEN05=tcgen05(arch))


def _plan_wgrad_bf16(
    lhs: ArrayType, rhs: ArrayType, group_ends: ArrayType, *, arch: str, out_dtype: str = "bfloat16"
) -> Launch:
    op = "grouped_wgrad_bf16"
    _check_bf16(op, lhs=lhs, rhs=rhs)
    require_shape(op, "rhs", rhs, (lhs.shape[0], rhs.shape[1]), "the tokens of lhs (M, N)")
    (m, n), k = lhs.shape, rhs.shape[1]
    return plan_k_grouped(op, arch, m, n, k, group_ends, out_dtype, _not_in_cuda(N=n, K=k), TCGEN05=tcgen05(arch))


def _plan_wgrad_bf16_t(
    lhs_t: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, *, arch: str, out_dtype: str = "bfloat16"
) -> Launch:
    op = "grouped_wgrad_bf16_t"
    _check_bf16(op, lhs_t=lhs_t, rhs_t=rhs_t)
    require_shape(op, "rhs_t", rhs_t, (rhs_t.shape[0], lhs_t.shape[1]), "the tokens of lhs_t (N, M)")
    (n, m), k = lhs_t.shape, rhs_t.shape[0]
    return plan_k_grouped(op, arch, m, n, k, group_ends, out_dtype, _not_in_cuda(M=m, K=k), TCGEN05=tcgen05(arch))


_MX_INPUTS = ("lhs_q", "lhs_sf", "rhs_q", "rhs_sf", "group_ends")
grouped_mm_mx = KernelOp("grouped_mm_mx", kernel.mm_mx_kernel, _MX_INPUTS, ("out",), (), _plan_mm_mx)
grouped_mm_bf16 = KernelOp(
    "grouped_mm_bf16", kernel.mm_bf16_kernel, ("lhs", "rhs_t", "group_ends"), ("out",), (), _plan_mm_bf16
)
grouped_wgrad_mx = KernelOp("grouped_wgrad_mx", kernel.wgrad_mx_kernel, _MX_INPUTS, ("out",), (), _plan_wgrad_mx)
grouped_wgrad_bf16 = KernelOp(
    "grouped_wgrad_bf16", kernel.wgrad_bf16_kernel, ("lhs", "rhs", "group_ends"), ("out",), (), _plan_wgrad_bf16
)
grouped_wgrad_bf16_t = KernelOp(
    "grouped_wgrad_bf16_t",
    kernel.wgrad_bf16_t_kernel,
    ("lhs_t", "rhs_t", "group_ends"),
    ("out",),
    (),
    _plan_wgrad_bf16_t,
)
