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

Sums are fp32. What is multiplied is bf16 on sm_90 (mx_math.dequantize_operand: its range) and E4M3 with its scales on
sm_100 (gemm_tile.dot_mx). On sm_90 bf16 operands are multiplied in CUDA C++, which is why both frontends dequantize
before their products there.
"""

import math
from collections.abc import Callable

import triton
import triton.language as tl

from .formats import BLOCK
from .gemm_tile import dot_bf16, dot_mx, e4m3_pointer, load_scales, load_tile, store_tile, tokens_of
from .launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from .mx_math import BLOCK_MX
from .tiles import Tiles, cdiv, hw_cast, next_power_of_2, tcgen05, tiles

OUT_DTYPES = ("bfloat16", "float32")

CUDA_COLUMNS = 8
"""The CUDA kernel of bf16 operands moves rows 16 bytes at a time: their lengths are multiples of this."""


@triton.jit
def rows_of_tile(tile, group_ends, M, G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr):
    """Group, first row and end of the group of a tile, which has rows of one group only.

    The rows past the last end count as group G.

    M            | group 0          | group 1 | group 2 (empty) | past the end |
    tiles of M   | 0      | 1   |     2    |                    | 3      | 4   |   5: nothing left
    """
    g = tl.arange(0, BLOCK_G)
    starts = tl.minimum(tl.load(group_ends + g - 1, mask=(g > 0) & (g <= G), other=0), M)
    ends = tl.minimum(tl.load(group_ends + g, mask=g < G, other=M), M)
    tiles_of = tl.where(g <= G, tl.cdiv(tl.maximum(ends - starts, 0), BLOCK_M), 0)
    tiles_end = tl.cumsum(tiles_of, 0)
    group = tl.sum((tiles_end <= tile).to(tl.int32), 0)
    end = tl.sum(tl.where(g == group, ends, 0), 0)
    m0 = tl.sum(tl.where(g == group, starts + (tile - tiles_end + tiles_of) * BLOCK_M, 0), 0)
    return group, m0, end


@triton.jit
def _m_grouped_tile(
    lhs, lhs_sf, rhs, rhs_sf, group_ends, M, out,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, MX: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n0 = (tl.program_id(0) % n_tiles) * BLOCK_N
    rows = rows_of_tile(tl.program_id(0) // n_tiles, group_ends, M, G, BLOCK_G, BLOCK_M)
    group, m0, end = rows
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    in_m, in_n = m < end, n < N
    row = m.to(tl.int64)
    weight_row = group.to(tl.int64) * N + n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, tl.where(group < G, K, 0), BLOCK_K):
        if MX:
            a = load_tile(e4m3_pointer(lhs, TCGEN05), row, in_m, k0, K, K, BLOCK_K)
            a_sf = load_scales(lhs_sf, 0, m0, end, k0, K, K, TCGEN05, BLOCK_M, BLOCK_K)
            b = load_tile(e4m3_pointer(rhs, TCGEN05), weight_row, in_n, k0, K, K, BLOCK_K)
            b_sf = load_scales(rhs_sf, group.to(tl.int64) * N, n0, N, k0, K, K, TCGEN05, BLOCK_N, BLOCK_K)
            acc = dot_mx(a, a_sf, b, b_sf, acc, k0, HW_CAST, TCGEN05)
        else:
            a = load_tile(lhs, row, in_m, k0, K, K, BLOCK_K)
            b = load_tile(rhs, weight_row, in_n, k0, K, K, BLOCK_K)
            acc = dot_bf16(a, tl.trans(b), acc, k0, HW_CAST, TCGEN05)
    store_tile(out, row, in_m, n0, N, N, acc, True, HW_CAST, TCGEN05)


@triton.jit
def _k_grouped_tile(
    lhs, lhs_sf, rhs, rhs_sf, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, MX: tl.constexpr, TOKENS_LAST: tl.constexpr,
    HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one group's weight gradient. TOKENS_LAST, as MX: operands lie (N, M) and (K, M), else transposed."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0)
    k0, n0 = (tile % k_tiles) * BLOCK_K, (tile // k_tiles % n_tiles) * BLOCK_N
    group = tile // (n_tiles * k_tiles)
    n, k = n0 + tl.arange(0, BLOCK_N), k0 + tl.arange(0, BLOCK_K)
    in_n, in_k = n < N, k < K
    row = n.to(tl.int64)

    before = tl.load(group_ends + group - 1, mask=group > 0, other=0)
    tokens = tokens_of(before, tl.load(group_ends + group), M, BLOCK_MX if MX else 1)  # 32 tokens share a scale
    start, end, whole = tokens
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if MX:
        pitch = M // BLOCK_MX * BLOCK_MX
        # A group's first scale lies at any byte, and no copy to shared memory takes single bytes: TCGEN05 loads the
        # next step's into registers while it multiplies.
        AHEAD: tl.constexpr = BLOCK_M if TCGEN05 else 0
        if TCGEN05:
            a_next = load_scales(lhs_sf, 0, n0, N, start, end, pitch, False, BLOCK_N, BLOCK_M)
            b_next = load_scales(rhs_sf, 0, k0, K, start, end, pitch, False, BLOCK_K, BLOCK_M)
        for m0 in range(start, end, BLOCK_M):
            a = load_tile(e4m3_pointer(lhs, TCGEN05), row, in_n, m0, end, pitch, BLOCK_M)
            a_sf = load_scales(lhs_sf, 0, n0, N, m0 + AHEAD, end, pitch, False, BLOCK_N, BLOCK_M)
            b = load_tile(e4m3_pointer(rhs, TCGEN05), k.to(tl.int64), in_k, m0, end, pitch, BLOCK_M)
            b_sf = load_scales(rhs_sf, 0, k0, K, m0 + AHEAD, end, pitch, False, BLOCK_K, BLOCK_M)
            if TCGEN05:
                a_next, b_next, a_sf, b_sf = a_sf, b_sf, a_next, b_next
            acc = dot_mx(a, a_sf, b, b_sf, acc, m0, HW_CAST, TCGEN05)
    elif TOKENS_LAST:
        for m0 in range(start, end, BLOCK_M):
            a = load_tile(lhs, row, in_n, m0, end, M, BLOCK_M)
            b = load_tile(rhs, k.to(tl.int64), in_k, m0, end, M, BLOCK_M)
            acc = dot_bf16(a, tl.trans(b), acc, m0, HW_CAST, TCGEN05)
    else:
        for m0 in range(start, end, BLOCK_M):
            m = m0 + tl.arange(0, BLOCK_M)
            a = load_tile(lhs, m.to(tl.int64), m < end, n0, N, N, BLOCK_N)
            b = load_tile(rhs, m.to(tl.int64), m < end, k0, K, K, BLOCK_K)
            acc = dot_bf16(tl.trans(a), b, acc, m0, HW_CAST, TCGEN05)
    store_tile(out, group.to(tl.int64) * N + row, in_n, k0, K, K, acc, whole, HW_CAST, TCGEN05)


@triton.jit
def _mm_mx_kernel(
    lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _m_grouped_tile(
        lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
        G, N, K, True, HW_CAST, TCGEN05, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _mm_bf16_kernel(
    lhs, rhs_t, group_ends, M, out,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _m_grouped_tile(
        lhs, None, rhs_t, None, group_ends, M, out,
        G, N, K, False, HW_CAST, TCGEN05, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _wgrad_mx_kernel(
    lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _k_grouped_tile(
        lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
        N, K, True, True, HW_CAST, TCGEN05, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _wgrad_bf16_kernel(
    lhs, rhs, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _k_grouped_tile(
        lhs, None, rhs, None, group_ends, M, out, N, K, False, False, HW_CAST, TCGEN05, BLOCK_M, BLOCK_N, BLOCK_K
    )


@triton.jit
def _wgrad_bf16_t_kernel(
    lhs_t, rhs_t, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr, TCGEN05: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _k_grouped_tile(
        lhs_t, None, rhs_t, None, group_ends, M, out, N, K, False, True, HW_CAST, TCGEN05, BLOCK_M, BLOCK_N, BLOCK_K
    )


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
grouped_mm_mx = KernelOp("grouped_mm_mx", _mm_mx_kernel, _MX_INPUTS, ("out",), (), _plan_mm_mx)
grouped_mm_bf16 = KernelOp(
    "grouped_mm_bf16", _mm_bf16_kernel, ("lhs", "rhs_t", "group_ends"), ("out",), (), _plan_mm_bf16
)
grouped_wgrad_mx = KernelOp("grouped_wgrad_mx", _wgrad_mx_kernel, _MX_INPUTS, ("out",), (), _plan_wgrad_mx)
grouped_wgrad_bf16 = KernelOp(
    "grouped_wgrad_bf16", _wgrad_bf16_kernel, ("lhs", "rhs", "group_ends"), ("out",), (), _plan_wgrad_bf16
)
grouped_wgrad_bf16_t = KernelOp(
    "grouped_wgrad_bf16_t", _wgrad_bf16_t_kernel, ("lhs_t", "rhs_t", "group_ends"), ("out",), (), _plan_wgrad_bf16_t
)
