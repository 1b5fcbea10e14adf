"""Grouped matrix products, one weight matrix per expert, exact path: products of dequantized values.

    M-grouped   lhs (M, K) x rhs_t (G, N, K) -> out (M, N)       forward; input gradient with the weights
                                                                 quantized along N
    K-grouped   lhs_t (N, M) x rhs_t (K, M)  -> out (G, N, K)    weight gradient, split along M

Operands are MXFP8 (q and sf, scaled along the contraction dim, which is the contiguous one) or bf16.
`group_ends` (G,) holds where each group ends along M; it is read on the device. Rows past the last
end are written as zeros, an empty group's weight gradient is zero, and no padding row is read into a
real one. The bf16 K-grouped product reads lhs (M, N) and rhs (M, K) as they lie; the MXFP8 one needs ends that
are multiples of 32. Sums are fp32; what is multiplied is bf16 on a GPU (mx_math.dequantize_operand: its range).
"""

import math
from collections.abc import Callable

import triton
import triton.language as tl

from .formats import BLOCK
from .launch import ArrayType, KernelOp, Launch, require_dtype, require_multiple, require_rank, require_shape
from .mx_math import BLOCK_MX, dequantize_operand, f32_to_bf16, to_f32
from .tiles import Tiles, cdiv, hw_cast, next_power_of_2, tiles

OUT_DTYPES = ("bfloat16", "float32")


@triton.jit
def _load(
    x, sf, row, in_rows, c0, c_end, PITCH,
    MX: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(BLOCK_R, BLOCK_C) values from column c0 on of rows PITCH apart; zeros where a row or column is outside."""
    c = c0 + tl.arange(0, BLOCK_C)
    inside = in_rows[:, None] & (c < c_end)[None, :]
    tile = tl.load(x + row[:, None] * PITCH + c[None, :], mask=inside, other=0)
    if MX:
        cb = c0 // BLOCK_MX + tl.arange(0, BLOCK_C // BLOCK_MX)
        inside_sf = in_rows[:, None] & (cb < c_end // BLOCK_MX)[None, :]
        sf_tile = tl.load(sf + row[:, None] * (PITCH // BLOCK_MX) + cb[None, :], mask=inside_sf, other=0)
        tile = tl.reshape(tile, (BLOCK_R, BLOCK_C // BLOCK_MX, BLOCK_MX))
        tile = tl.reshape(dequantize_operand(tile, sf_tile, HW_CAST), (BLOCK_R, BLOCK_C))
    elif not HW_CAST:
        tile = to_f32(tile)
    return tile


@triton.jit
def store_tile(out, row, in_rows, c, in_cols, PITCH, value, HW_CAST: tl.constexpr):
    if out.dtype.element_ty == tl.bfloat16:
        value = f32_to_bf16(value, HW_CAST)
    tl.store(out + row[:, None] * PITCH + c[None, :], value, mask=in_rows[:, None] & in_cols[None, :])


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
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, MX: tl.constexpr, HW_CAST: tl.constexpr,
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
        a = _load(lhs, lhs_sf, row, in_m, k0, K, K, MX, HW_CAST, BLOCK_M, BLOCK_K)
        b = _load(rhs, rhs_sf, weight_row, in_n, k0, K, K, MX, HW_CAST, BLOCK_N, BLOCK_K)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    store_tile(out, row, in_m, n, in_n, N, acc, HW_CAST)


@triton.jit
def _k_grouped_tile(
    lhs, lhs_sf, rhs, rhs_sf, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, MX: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one group's weight gradient. MX operands lie (N, M) and (K, M), bf16 ones (M, N) and (M, K)."""
    n_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0)
    k0, n0 = (tile % k_tiles) * BLOCK_K, (tile // k_tiles % n_tiles) * BLOCK_N
    group = tile // (n_tiles * k_tiles)
    n, k = n0 + tl.arange(0, BLOCK_N), k0 + tl.arange(0, BLOCK_K)
    in_n, in_k = n < N, k < K
    row = n.to(tl.int64)

    start = tl.load(group_ends + group - 1, mask=group > 0, other=0)
    end = tl.minimum(tl.load(group_ends + group), M)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if MX:
        # A block of 32 tokens shares a scale, so ends are multiples of 32: divided and multiplied, the compiler
        # knows it too and loads 16 bytes at a time.
        tl.device_assert((start % BLOCK_MX == 0) & (end % BLOCK_MX == 0), "group_ends: allowed: multiples of 32")
        start, end, pitch = start // BLOCK_MX * BLOCK_MX, end // BLOCK_MX * BLOCK_MX, M // BLOCK_MX * BLOCK_MX
        for m0 in range(start, end, BLOCK_M):
            a = _load(lhs, lhs_sf, row, in_n, m0, end, pitch, True, HW_CAST, BLOCK_N, BLOCK_M)
            b = _load(rhs, rhs_sf, k.to(tl.int64), in_k, m0, end, pitch, True, HW_CAST, BLOCK_K, BLOCK_M)
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    else:
        for m0 in range(start, end, BLOCK_M):
            m = m0 + tl.arange(0, BLOCK_M)
            a = _load(lhs, None, m.to(tl.int64), m < end, n0, N, N, False, HW_CAST, BLOCK_M, BLOCK_N)
            b = _load(rhs, None, m.to(tl.int64), m < end, k0, K, K, False, HW_CAST, BLOCK_M, BLOCK_K)
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    store_tile(out, group.to(tl.int64) * N + row, in_n, k, in_k, K, acc, HW_CAST)


@triton.jit
def _mm_mx_kernel(
    lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _m_grouped_tile(
        lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
        G, N, K, True, HW_CAST, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _mm_bf16_kernel(
    lhs, rhs_t, group_ends, M, out,
    G: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _m_grouped_tile(
        lhs, None, rhs_t, None, group_ends, M, out,
        G, N, K, False, HW_CAST, BLOCK_G, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def _wgrad_mx_kernel(
    lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _k_grouped_tile(
        lhs_q, lhs_sf, rhs_q, rhs_sf, group_ends, M, out, N, K, True, HW_CAST, BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip


@triton.jit
def _wgrad_bf16_kernel(
    lhs, rhs, group_ends, M, out,
    N: tl.constexpr, K: tl.constexpr, HW_CAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    _k_grouped_tile(lhs, None, rhs, None, group_ends, M, out, N, K, False, HW_CAST, BLOCK_M, BLOCK_N, BLOCK_K)


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


def _launch(
    op: str, arch: str, out: ArrayType, m: int, n: int, k: int, num_tiles: Callable[[Tiles], int], **meta: int
) -> Launch:
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
    )  # fmt: skip


def plan_m_grouped(
    op: str, arch: str, lhs: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, out_dtype: str
) -> Launch:
    g, n, k = rhs_t.shape
    require_shape(op, "lhs", lhs, (lhs.shape[0], k), "the contraction dim of rhs_t (G, N, K)")
    check_ends(op, group_ends, g)
    out = ArrayType((lhs.shape[0], n), out_dtype)
    require_dtype(op, "out_dtype", out, *OUT_DTYPES)
    m = lhs.shape[0]

    def num_tiles(t: Tiles) -> int:
        """Every group may leave a partial tile, and so may the rows past the last end."""
        return (cdiv(m, t.m) + g) * cdiv(n, t.n)

    return _launch(op, arch, out, m, n, k, num_tiles, G=g, BLOCK_G=next_power_of_2(g + 1))


def plan_k_grouped(op: str, arch: str, m: int, n: int, k: int, group_ends: ArrayType, out_dtype: str) -> Launch:
    check_ends(op, group_ends, None)
    groups = group_ends.shape[0]
    out = ArrayType((groups, n, k), out_dtype)
    require_dtype(op, "out_dtype", out, *OUT_DTYPES)
    return _launch(op, arch, out, m, n, k, lambda t: groups * cdiv(n, t.n) * cdiv(k, t.k))


def _plan_mm_mx(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    _check_mx("grouped_mm_mx", "lhs", lhs_q, lhs_sf, 2)
    _check_mx("grouped_mm_mx", "rhs", rhs_q, rhs_sf, 3)
    return plan_m_grouped("grouped_mm_mx", arch, lhs_q, rhs_q, group_ends, out_dtype)


def _plan_mm_bf16(
    lhs: ArrayType, rhs_t: ArrayType, group_ends: ArrayType, *, arch: str, out_dtype: str = "bfloat16"
) -> Launch:
    require_dtype("grouped_mm_bf16", "lhs", lhs, "bfloat16")
    require_dtype("grouped_mm_bf16", "rhs_t", rhs_t, "bfloat16")
    require_rank("grouped_mm_bf16", "lhs", lhs, 2)
    require_rank("grouped_mm_bf16", "rhs_t", rhs_t, 3)
    return plan_m_grouped("grouped_mm_bf16", arch, lhs, rhs_t, group_ends, out_dtype)


def _plan_wgrad_mx(
    lhs_q: ArrayType, lhs_sf: ArrayType, rhs_q: ArrayType, rhs_sf: ArrayType, group_ends: ArrayType,
    *, arch: str, out_dtype: str = "bfloat16",
) -> Launch:  # fmt: skip
    op = "grouped_wgrad_mx"
    _check_mx(op, "lhs", lhs_q, lhs_sf, 2)
    _check_mx(op, "rhs", rhs_q, rhs_sf, 2)
    require_shape(op, "rhs_q", rhs_q, (rhs_q.shape[0], lhs_q.shape[1]), "the tokens of lhs_q (N, M)")
    return plan_k_grouped(op, arch, lhs_q.shape[1], lhs_q.shape[0], rhs_q.shape[0], group_ends, out_dtype)


def _plan_wgrad_bf16(
    lhs: ArrayType, rhs: ArrayType, group_ends: ArrayType, *, arch: str, out_dtype: str = "bfloat16"
) -> Launch:
    op = "grouped_wgrad_bf16"
    require_dtype(op, "lhs", lhs, "bfloat16")
    require_dtype(op, "rhs", rhs, "bfloat16")
    require_rank(op, "lhs", lhs, 2)
    require_rank(op, "rhs", rhs, 2)
    require_shape(op, "rhs", rhs, (lhs.shape[0], rhs.shape[1]), "the tokens of lhs (M, N)")
    m, n = lhs.shape
    return plan_k_grouped(op, arch, m, n, rhs.shape[1], group_ends, out_dtype)


_MX_INPUTS = ("lhs_q", "lhs_sf", "rhs_q", "rhs_sf", "group_ends")
grouped_mm_mx = KernelOp("grouped_mm_mx", _mm_mx_kernel, _MX_INPUTS, ("out",), (), _plan_mm_mx)
grouped_mm_bf16 = KernelOp(
    "grouped_mm_bf16", _mm_bf16_kernel, ("lhs", "rhs_t", "group_ends"), ("out",), (), _plan_mm_bf16
)
grouped_wgrad_mx = KernelOp("grouped_wgrad_mx", _wgrad_mx_kernel, _MX_INPUTS, ("out",), (), _plan_wgrad_mx)
grouped_wgrad_bf16 = KernelOp(
    "grouped_wgrad_bf16", _wgrad_bf16_kernel, ("lhs", "rhs", "group_ends"), ("out",), (), _plan_wgrad_bf16
)
