"""Grouped matrix products, one weight matrix per expert, exact path: products of dequantized values.

    M-grouped   lhs (M, K) x rhs_t (G, N, K) -> out (M, N)       forward; input gradient with the weights
                                                                 quantized along N
    K-grouped   lhs_t (N, M) x rhs_t (K, M)  -> out (G, N, K)    weight gradient, split along M

Operands are MXFP8 (q and sf, scaled along the contraction dim, which is contiguous) or bf16. `group_ends` (G,) holds
where each group ends along M; kernels read it on the device. Rows past the last end are zeros or, without
`clear_rest`, unspecified; nothing reads them. The weight gradient of an empty group is zero. The bf16 K-grouped product
also takes lhs (M, N) and rhs (M, K); its ends are any non-decreasing numbers. The ends of the MXFP8 weight gradient are
multiples of 32. On a GPU the host does not check ends. If an end is no multiple, the weight gradients of the groups on
both sides of it are NaN in every element. So are the weight gradients of groups that end before they begin or beyond M.
"""

import math

from ...dispatch import facts
from ...formats import BLOCK
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
from ...tiles import Tiles, cdiv, next_power_of_2, tiles

OUT_DTYPES = ("bfloat16", "float32")
CUDA_COLUMNS = 8
"""The CUDA kernel of bf16 operands copies rows 16 bytes at a time: their lengths are multiples of this."""


def check_ends(op: str, group_ends: ArrayType, groups: int | None) -> None:
    """Raise unless `group_ends` is (G,) int32, for the number of groups of the weights if there are weights."""
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    if groups is not None:
        require_shape(op, "group_ends", group_ends, (groups,), "one end per group of the weights")


def rows_signature(op: str, m: int, n: int, out_dtype: str, clear_rest: bool) -> Signature:
    """Signature of an M-grouped product with one output (M, N)."""
    out = ArrayType((m, n), out_dtype)
    require_dtype(op, "out_dtype", out, *OUT_DTYPES)
    if clear_rest not in (False, True):
        fail(TypeError, op, "clear_rest", repr(clear_rest), "allowed: a bool")
    return Signature((out,), {"clear_rest": int(clear_rest)}, tokens=(m, 1))


def check_m_grouped(
    op: str, lhs: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, out_dtype: str, clear_rest: bool
) -> Signature:
    """Signature of lhs (M, K) x rhs_t (G, N, K)."""
    groups, n, k = rhs_t.shape
    m = lhs.shape[0]
    require_shape(op, "lhs", lhs, (m, k), "the contraction dim of rhs_t (G, N, K)")
    check_ends(op, group_ends, groups)
    return rows_signature(op, m, n, out_dtype, clear_rest)


def check_k_grouped(op: str, m: int, n: int, k: int, group_ends: ArrayType, out_dtype: str, multiple: int) -> Signature:
    """Signature of lhs_t (N, M) x rhs_t (K, M), whose groups end at multiples of `multiple`."""
    check_ends(op, group_ends, None)
    out = ArrayType((group_ends.shape[0], n, k), out_dtype)
    require_dtype(op, "out_dtype", out, *OUT_DTYPES)
    return Signature((out,), tokens=(m, multiple))


def tile_m_grouped(call: Call, arch: str, **meta: bool) -> Tiling:
    """Tiles of out (M, N); each group may leave a partial tile, and so may the rows past the last end."""
    (m, k), (groups,), n = call.inputs[0].shape, call.inputs[-1].shape, call.out[0].shape[1]
    t = tiles(call.op, arch)
    programs = (cdiv(m, t.m) + groups) * cdiv(n, t.n)
    return _tile(call, arch, t, programs, m, n, k, G=groups, BLOCK_G=next_power_of_2(groups + 1), **meta)


def tile_k_grouped(call: Call, arch: str, m: int, **meta: bool) -> Tiling:
    """Tiles of out (G, N, K), the sums over the M tokens of each group."""
    (groups, n, k), t = call.out[0].shape, tiles(call.op, arch)
    return _tile(call, arch, t, groups * cdiv(n, t.n) * cdiv(k, t.k), m, n, k, **meta)


def _tile(call: Call, arch: str, t: Tiles, programs: int, m: int, n: int, k: int, **meta: int) -> Tiling:
    grid = (programs if math.prod(call.out[0].shape) else 0,)
    blocks = {"BLOCK_M": t.m, "BLOCK_N": t.n, "BLOCK_K": t.k}
    return t.tiling(grid, {"M": m}, N=n, K=k, HW_CAST=facts(arch).hw_cast, **meta, **blocks)


def cuda_unsupported(**columns: int) -> str:
    """The reason why the CUDA kernel does not take rows of these lengths; "" where it does."""
    for dim, size in columns.items():
        if size % CUDA_COLUMNS:
            return f"allowed: triton; its CUDA kernel takes {dim} in multiples of {CUDA_COLUMNS}, this is {size}"
    return ""


def _check_mx_operand(op: str, name: str, q: ArrayType, sf: ArrayType, rank: int) -> None:
    require_dtype(op, f"{name}_q", q, "uint8")
    require_dtype(op, f"{name}_sf", sf, "uint8")
    require_rank(op, f"{name}_q", q, rank)
    require_multiple(op, f"{name}_q", q.shape[-1], BLOCK, "contraction dim")
    require_shape(op, f"{name}_sf", sf, (*q.shape[:-1], q.shape[-1] // BLOCK), f"one scale per 32 values of {name}_q")


def _check_bf16_operands(op: str, **matrices: ArrayType) -> None:
    for name, matrix in matrices.items():
        require_dtype(op, name, matrix, "bfloat16")
        require_rank(op, name, matrix, 2)


def _check_mm_mx(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16", clear_rest: bool = True,
) -> Signature:  # fmt: skip
    op = "grouped_mm_mx"
    _check_mx_operand(op, "lhs", lhs_q, lhs_sf, 2)
    _check_mx_operand(op, "rhs", rhs_q, rhs_sf, 3)
    require_shape(op, "lhs_q", lhs_q, (lhs_q.shape[0], rhs_q.shape[2]), "the contraction dim of rhs_q")
    return check_m_grouped(op, lhs_q, rhs_q, group_ends, out_dtype, clear_rest)


def _check_mm_bf16(
    lhs: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, *, out_dtype: str = "bfloat16", clear_rest: bool = True
) -> Signature:
    op = "grouped_mm_bf16"
    require_dtype(op, "lhs", lhs, "bfloat16")
    require_dtype(op, "rhs_t", rhs_t, "bfloat16")
    require_rank(op, "lhs", lhs, 2)
    require_rank(op, "rhs_t", rhs_t, 3)
    return check_m_grouped(op, lhs, rhs_t, group_ends, out_dtype, clear_rest)


def _check_wgrad_mx(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, out_dtype: str = "bfloat16",
) -> Signature:  # fmt: skip
    op = "grouped_wgrad_mx"
    _check_mx_operand(op, "lhs", lhs_q, lhs_sf, 2)
    _check_mx_operand(op, "rhs", rhs_q, rhs_sf, 2)
    require_shape(op, "rhs_q", rhs_q, (rhs_q.shape[0], lhs_q.shape[1]), "the tokens of lhs_q (N, M)")
    (n, m), k = lhs_q.shape, rhs_q.shape[0]
    return check_k_grouped(op, m, n, k, group_ends, out_dtype, BLOCK)


def _check_wgrad_bf16(
    lhs: ArrayType, rhs: ArrayType, group_ends: ArrayType, *, out_dtype: str = "bfloat16"
) -> Signature:
    op = "grouped_wgrad_bf16"
    _check_bf16_operands(op, lhs=lhs, rhs=rhs)
    require_shape(op, "rhs", rhs, (lhs.shape[0], rhs.shape[1]), "the tokens of lhs (M, N)")
    (m, n), k = lhs.shape, rhs.shape[1]
    return check_k_grouped(op, m, n, k, group_ends, out_dtype, 1)


def _check_wgrad_bf16_t(
    lhs_t: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, *, out_dtype: str = "bfloat16"
) -> Signature:
    op = "grouped_wgrad_bf16_t"
    _check_bf16_operands(op, lhs_t=lhs_t, rhs_t=rhs_t)
    require_shape(op, "rhs_t", rhs_t, (rhs_t.shape[0], lhs_t.shape[1]), "the tokens of lhs_t (N, M)")
    (n, m), k = lhs_t.shape, rhs_t.shape[0]
    return check_k_grouped(op, m, n, k, group_ends, out_dtype, 1)


def _tile_mm(call: Call, arch: str) -> Tiling:
    return tile_m_grouped(call, arch, TCGEN05=facts(arch).tcgen05)


def _tile_mm_bf16(call: Call, arch: str) -> Tiling:
    unsupported = cuda_unsupported(N=call.out[0].shape[1], K=call.inputs[0].shape[1])
    return _tile_mm(call, arch)._replace(cuda_unsupported=unsupported)


def _tile_wgrad_mx(call: Call, arch: str) -> Tiling:
    return tile_k_grouped(call, arch, call.inputs[0].shape[1], TCGEN05=facts(arch).tcgen05)


def _tile_wgrad_bf16(call: Call, arch: str) -> Tiling:
    (m, n), k = call.inputs[0].shape, call.inputs[1].shape[1]
    tiling = tile_k_grouped(call, arch, m, TCGEN05=facts(arch).tcgen05)
    return tiling._replace(cuda_unsupported=cuda_unsupported(N=n, K=k))


def _tile_wgrad_bf16_t(call: Call, arch: str) -> Tiling:
    (_, m), k = call.inputs[0].shape, call.inputs[1].shape[0]
    tiling = tile_k_grouped(call, arch, m, TCGEN05=facts(arch).tcgen05)
    return tiling._replace(cuda_unsupported=cuda_unsupported(M=m, K=k))


ENDS = "group_ends: (G,) int32, where each group ends along M: non-decreasing, up to M."
CLEAR_REST = """clear_rest: whether rows of out past the last end are zeros. Otherwise they are unspecified, and nothing
            writes them."""
_MX_INPUTS = ("lhs_q", "lhs_sf", "rhs_q", "rhs_sf", "group_ends")
grouped_mm_mx = KernelOp(
    "grouped_mm_mx",
    f"""Each group of rows times its weight matrix, MXFP8 operands, products of dequantized values.

    Args:
        lhs_q: (M, K) E4M3.
        lhs_sf: (M, K/32) E8M0.
        rhs_q: (G, N, K) E4M3.
        rhs_sf: (G, N, K/32) E8M0. All uint8, scaled along K, which is a multiple of 32.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs[g]^T for the group g of each row, summed in fp32 and rounded once.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> q, sf = ops.quantize_row(xp.ones((1, 32)))
        >>> w, w_sf = ops.quantize_row(xp.ones((1, 8, 32)))
        >>> ops.grouped_mm_mx(q, sf, w, w_sf, xp.asarray([1], dtype=xp.int32))[0, 0].item()
        32.0
    """,
    _MX_INPUTS,
    ("out",),
    _check_mm_mx,
    _tile_mm,
    "grouped_gemm.exact.kernel:mm_mx_kernel",
)
grouped_mm_bf16 = KernelOp(
    "grouped_mm_bf16",
    f"""Each group of rows times its weight matrix, bf16 operands.

    Args:
        lhs: (M, K) bf16.
        rhs_t: (G, N, K) bf16.
        {ENDS}
        out_dtype: "bfloat16" or "float32".
        {CLEAR_REST}

    Returns:
        out (M, N) = lhs rhs_t[g]^T for the group g of each row, summed in fp32 and rounded once.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> lhs, rhs_t = xp.ones((3, 2), dtype=xp.bfloat16), xp.ones((2, 1, 2), dtype=xp.bfloat16)
        >>> ops.grouped_mm_bf16(lhs, rhs_t, xp.asarray([1, 2], dtype=xp.int32)).tolist()
        [[2.0], [2.0], [0.0]]
    """,
    ("lhs", "rhs_t", "group_ends"),
    ("out",),
    _check_mm_bf16,
    _tile_mm_bf16,
    "grouped_gemm.exact.kernel:mm_bf16_kernel",
)
grouped_wgrad_mx = KernelOp(
    "grouped_wgrad_mx",
    """The weight gradient of each group, MXFP8 operands, products of dequantized values.

    Args:
        lhs_q: (N, M) E4M3.
        lhs_sf: (N, M/32) E8M0.
        rhs_q: (K, M) E4M3.
        rhs_sf: (K, M/32) E8M0. All uint8, scaled along the tokens M, a multiple of 32.
        group_ends: (G,) int32, where each group ends along M: non-decreasing multiples of 32, up to M.
        out_dtype: "bfloat16" or "float32".

    Returns:
        out (G, N, K) = lhs rhs^T over the tokens of each group, summed in fp32 and rounded once; zeros for an empty
        group.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> q_t, sf_t = ops.quantize_col(xp.ones((32, 8)))
        >>> dw = ops.grouped_wgrad_mx(q_t, sf_t, q_t, sf_t, xp.asarray([32], dtype=xp.int32))
        >>> tuple(dw.shape), dw[0, 0, 0].item()
        ((1, 8, 8), 32.0)
    """,
    _MX_INPUTS,
    ("out",),
    _check_wgrad_mx,
    _tile_wgrad_mx,
    "grouped_gemm.exact.kernel:wgrad_mx_kernel",
)
grouped_wgrad_bf16 = KernelOp(
    "grouped_wgrad_bf16",
    f"""The weight gradient of each group, bf16 operands with the tokens first.

    Args:
        lhs: (M, N) bf16.
        rhs: (M, K) bf16.
        {ENDS}
        out_dtype: "bfloat16" or "float32".

    Returns:
        out (G, N, K) = lhs^T rhs over the tokens of each group, summed in fp32 and rounded once; zeros for an empty
        group.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> dout, x = xp.ones((3, 1), dtype=xp.bfloat16), xp.ones((3, 2), dtype=xp.bfloat16)
        >>> ops.grouped_wgrad_bf16(dout, x, xp.asarray([1, 3], dtype=xp.int32)).tolist()
        [[[1.0, 1.0]], [[2.0, 2.0]]]
    """,
    ("lhs", "rhs", "group_ends"),
    ("out",),
    _check_wgrad_bf16,
    _tile_wgrad_bf16,
    "grouped_gemm.exact.kernel:wgrad_bf16_kernel",
)
grouped_wgrad_bf16_t = KernelOp(
    "grouped_wgrad_bf16_t",
    f"""The weight gradient of each group, bf16 operands with the tokens last: `grouped_wgrad_bf16` of their transposes.

    Args:
        lhs_t: (N, M) bf16.
        rhs_t: (K, M) bf16.
        {ENDS}
        out_dtype: "bfloat16" or "float32".

    Returns:
        out (G, N, K) = lhs_t rhs_t^T over the tokens of each group, summed in fp32 and rounded once; zeros for an empty
        group.

    Raises:
        ValueError: shape, on a CPU also the ends.
        TypeError: dtype.

    Example:
        >>> dout_t, x_t = xp.ones((1, 3), dtype=xp.bfloat16), xp.ones((2, 3), dtype=xp.bfloat16)
        >>> ops.grouped_wgrad_bf16_t(dout_t, x_t, xp.asarray([1, 3], dtype=xp.int32)).tolist()
        [[[1.0, 1.0]], [[2.0, 2.0]]]
    """,
    ("lhs_t", "rhs_t", "group_ends"),
    ("out",),
    _check_wgrad_bf16_t,
    _tile_wgrad_bf16_t,
    "grouped_gemm.exact.kernel:wgrad_bf16_t_kernel",
)
