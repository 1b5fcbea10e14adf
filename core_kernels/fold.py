"""One scale per row instead of one per 32 values: what an FP8 tensor core without block scales multiplies.

    q (M, K), sf (M, K/32) --fold_rows--> qf (M, K), row_sf (M,)
    x (M, K) ------quantize_row_fold----> the same, x read once
    [q | sf], row_map --permute_mx_fold-> the same, of gathered rows

row_sf is the row's largest scale byte and qf = RTNE(q * 2^(sf - row_sf)). A NaN block (byte 255) has no say in
row_sf and becomes NaN elements, 0x7F: the other blocks keep their values. Only a row of NaN blocks alone has
row_sf 255. A program holds whole rows: its scale is not known before the last block.
"""

import math

import triton
import triton.language as tl

from .formats import BLOCK, E8M0_NAN, Rounding
from .launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_multiple, require_rank, require_shape
from .mx_math import BLOCK_MX, F32_NAN, e4m3_to_f32, f32_to_e4m3, quantize_blocks, to_f32
from .permute import check_map, packed_blocks
from .quantize import FLOATS
from .tiles import cdiv, hw_cast, row_tiles

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)


@triton.jit
def _store_folded(
    q_blocks, sf_tile, m, k, kb, M, qf, row_sf,
    K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Fold rows m, given as q (BLOCK_M, BLOCK_K / 32, 32) and sf (BLOCK_M, BLOCK_K / 32), and store them."""
    byte = sf_tile.to(tl.int32)
    counts = (kb < K // BLOCK_MX)[None, :] & (byte != NAN_BYTE)
    row = tl.max(tl.where(counts, byte, -1), 1)
    # 448 * 2^-32 rounds to zero, and 2^-254 is no fp32 number
    shift = tl.maximum(byte - row[:, None], -32)
    factor = tl.where(byte == NAN_BYTE, F32_NAN, (127 + shift) << 23).to(tl.float32, bitcast=True)
    folded = f32_to_e4m3(e4m3_to_f32(q_blocks, HW_CAST) * tl.expand_dims(factor, 2), HW_CAST)
    inside = (m < M)[:, None] & (k < K)[None, :]
    tl.store(qf + m[:, None] * K + k[None, :], tl.reshape(folded, (BLOCK_M, BLOCK_K)), mask=inside)
    tl.store(row_sf + m, tl.where(row < 0, NAN_BYTE, row).to(tl.uint8), mask=m < M)


@triton.jit
def _fold_kernel(
    q, sf, M, qf, row_sf,
    K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k, kb = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // BLOCK_MX)
    scales: tl.constexpr = K // BLOCK_MX
    q_tile = tl.load(q + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0)
    sf_tile = tl.load(sf + m[:, None] * scales + kb[None, :], mask=(m < M)[:, None] & (kb < scales)[None, :], other=0)
    blocks = tl.reshape(q_tile, (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
    _store_folded(blocks, sf_tile, m, k, kb, M, qf, row_sf, K, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def _quantize_fold_kernel(
    x, M, qf, row_sf,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k, kb = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // BLOCK_MX)
    v = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
    blocks = tl.reshape(to_f32(v), (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
    q_blocks, sf_tile = quantize_blocks(blocks, 2, rounding, satfinite, HW_CAST)
    _store_folded(q_blocks, sf_tile, m, k, kb, M, qf, row_sf, K, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def _permute_fold_kernel(
    packed, row_map, R, P, qf, row_sf,
    K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k, kb = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // BLOCK_MX)
    scales: tl.constexpr = K // BLOCK_MX
    row = tl.load(row_map + i, mask=i < P, other=-1).to(tl.int64)
    tl.device_assert((row >= -1) & (row < R), "row_map points outside the input")
    real = ((row >= 0) & (row < R))[:, None]
    start = packed + row[:, None] * (K + scales)
    q_tile = tl.load(start + k[None, :], mask=real & (k < K)[None, :], other=0)
    sf_tile = tl.load(start + K + kb[None, :], mask=real & (kb < scales)[None, :], other=0)
    blocks = tl.reshape(q_tile, (BLOCK_M, BLOCK_K // BLOCK_MX, BLOCK_MX))
    _store_folded(blocks, sf_tile, i, k, kb, P, qf, row_sf, K, HW_CAST, BLOCK_M, BLOCK_K)


def _launch(
    op: str, arch: str, shape: tuple[int, ...], attrs: dict[str, int], scalars: dict[str, int] | None = None
) -> Launch:
    """Outputs and whole-row tiles of qf with this shape; `scalars` if they are not its number of rows."""
    *lead, k = shape
    if k == 0:
        fail(ValueError, op, "K", 0, f"allowed: multiples of {BLOCK} from {BLOCK}; a row without blocks has no scale")
    out = (ArrayType(shape, "uint8"), ArrayType(tuple(lead), "uint8"))
    if arch == "cpu":
        return Launch(out, tuple(attrs.values()))
    m = math.prod(lead)
    t = row_tiles(op, arch, k)
    return Launch(
        out=out,
        attrs=tuple(attrs.values()),
        grid=(cdiv(m, t.m),),
        scalars=scalars or {"M": m},
        meta={"K": k, **attrs, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m, "BLOCK_K": t.k},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


def _plan_fold(q: ArrayType, sf: ArrayType, *, arch: str) -> Launch:
    op = "fold_rows"
    require_dtype(op, "q", q, "uint8")
    require_dtype(op, "sf", sf, "uint8")
    require_rank(op, "q", q, 2, 3)
    require_multiple(op, "q", q.shape[-1], BLOCK, "last dim")
    require_shape(op, "sf", sf, (*q.shape[:-1], q.shape[-1] // BLOCK), "one scale per 32 values of q's last dim")
    return _launch(op, arch, q.shape, {})


def _plan_quantize_fold(
    x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
) -> Launch:
    op = "quantize_row_fold"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")
    return _launch(op, arch, x.shape, {"rounding": int(Rounding(rounding)), "satfinite": int(satfinite)})


def _plan_permute_fold(packed: ArrayType, row_map: ArrayType, *, arch: str) -> Launch:
    op = "permute_mx_fold"
    blocks = packed_blocks(op, packed)
    check_map(op, row_map)
    p = row_map.shape[0]
    return _launch(op, arch, (p, blocks * BLOCK), {}, {"R": packed.shape[0], "P": p})


_OUT = ("qf", "row_sf")
fold_rows = KernelOp("fold_rows", _fold_kernel, ("q", "sf"), _OUT, (), _plan_fold)
quantize_row_fold = KernelOp(
    "quantize_row_fold", _quantize_fold_kernel, ("x",), _OUT, ("rounding", "satfinite"), _plan_quantize_fold
)
permute_mx_fold = KernelOp("permute_mx_fold", _permute_fold_kernel, ("packed", "row_map"), _OUT, (), _plan_permute_fold)
