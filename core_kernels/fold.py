"""One scale per row instead of one per 32 values: what an FP8 tensor core without block scales multiplies.

    q (M, K), sf (M, K/32) --fold_rows--> qf (M, K), row_sf (M,)
    x (M, K) ------quantize_row_fold----> the same, x read once
    [q | sf], row_map --permute_mx_fold-> the same, of gathered rows
    q (R, M), sf (R, M/32), group_ends (G,) --fold_groups--> qf (R, M), span_sf (S, R)

row_sf is the row's largest scale byte and qf = RTNE(q * 2^(sf - row_sf)). A NaN block (byte 255) has no say in
row_sf and becomes NaN elements, 0x7F: the other blocks keep their values. Only a row of NaN blocks alone has
row_sf 255. A program holds whole rows: its scale is not known before the last block.

`fold_groups` has a scale per row and span of 256 tokens of a group: the largest byte so far in the group, and one more
in its first span, so that those after it seldom raise the scale. It is written in one walk over the group, before the
group's largest byte is known, and a product rescales its sums where the scale rose.

    tokens   0 ------- 256 ------- 512 - 544 ------------ 800 - 832   group_ends = [544, 832]
    spans    | 0       | 1         | 2   | 0              | 1   |
    slot     0         1           2     3 = 544/256 + 1  4           S = spans(M, G) of them; others stay unused: 0

Columns past the last end become zeros. On a GPU, where nobody looks at ends, one that is no multiple of 32 counts as
the multiple below it, and all slots of the groups on both sides of it have scale 255, NaN. So have those of groups that
end before they begin or beyond M.
"""

import math

import triton
import triton.language as tl

from .formats import BLOCK, E8M0_NAN, HEADROOM, SPAN, Rounding, scale_attrs, spans
from .gemm_tile import tokens_of
from .launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_multiple, require_rank, require_shape
from .mx_math import BLOCK_MX, F32_NAN, e4m3_to_f32, f32_to_e4m3, quantize_blocks, to_f32
from .permute import check_map, packed_blocks
from .quantize import FLOATS
from .tiles import cdiv, hw_cast, row_tiles, tiles

NAN_BYTE: tl.constexpr = tl.constexpr(E8M0_NAN)
SPAN_MX: tl.constexpr = tl.constexpr(SPAN)
HEADROOM_MX: tl.constexpr = tl.constexpr(HEADROOM)


@triton.jit
def fold_tile(q_blocks, byte, scale, axis: tl.constexpr, HW_CAST: tl.constexpr):
    """q in blocks along `axis` under their bytes, int32 without it -> under `scale`, which broadcasts to these."""
    # 448 * 2^-32 rounds to zero, and 2^-254 is no fp32 number
    shift = tl.maximum(byte - scale, -32)
    factor = tl.where(byte == NAN_BYTE, F32_NAN, (127 + shift) << 23).to(tl.float32, bitcast=True)
    return f32_to_e4m3(e4m3_to_f32(q_blocks, HW_CAST) * tl.expand_dims(factor, axis), HW_CAST)


@triton.jit
def store_folded(
    q_blocks, sf_tile, m, k, kb, M, qf, row_sf,
    K: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Fold rows m, given as q (BLOCK_M, BLOCK_K / 32, 32) and sf (BLOCK_M, BLOCK_K / 32), and store them."""
    byte = sf_tile.to(tl.int32)
    counts = (kb < K // BLOCK_MX)[None, :] & (byte != NAN_BYTE)
    row = tl.max(tl.where(counts, byte, -1), 1)
    folded = fold_tile(q_blocks, byte, row[:, None], 2, HW_CAST)
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
    store_folded(blocks, sf_tile, m, k, kb, M, qf, row_sf, K, HW_CAST, BLOCK_M, BLOCK_K)


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
    store_folded(q_blocks, sf_tile, m, k, kb, M, qf, row_sf, K, HW_CAST, BLOCK_M, BLOCK_K)


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
    store_folded(blocks, sf_tile, i, k, kb, P, qf, row_sf, K, HW_CAST, BLOCK_M, BLOCK_K)


@triton.jit
def _fold_groups_kernel(
    q, sf, group_ends, R, M, qf, span_sf,
    G: tl.constexpr, HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Some rows of one group of columns, span by span; the columns past the last end count as group G."""
    BLOCKS: tl.constexpr = SPAN_MX // BLOCK_MX
    r, group = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    in_r, pitch = (r < R)[:, None], M // BLOCK_MX
    before = tl.load(group_ends + group - 1, mask=group > 0, other=0)
    tokens = tokens_of(before, tl.load(group_ends + group, mask=group < G, other=M), M, BLOCK_MX)
    first, last, whole = tokens
    broken = (group < G) & (whole == 0)
    # Counted in blocks: multiplied by 32 below, the compiler knows it and loads 16 bytes at a time.
    start, end = first // BLOCK_MX, last // BLOCK_MX
    slot, end_slot = start // BLOCKS + group, end // BLOCKS + group + (group < G).to(tl.int32)

    largest = tl.zeros((BLOCK_M,), tl.int32)  # one more than the byte; 0: no block had a say
    for b0 in range(start, end, BLOCKS):
        b, m = b0 + tl.arange(0, BLOCKS), tl.arange(0, SPAN_MX) + b0 * BLOCK_MX
        inside, at = in_r & (m < end * BLOCK_MX)[None, :], r[:, None] * (pitch * BLOCK_MX) + m[None, :]
        if group < G:
            byte = tl.load(sf + r[:, None] * pitch + b[None, :], mask=in_r & (b < end)[None, :], other=NAN_BYTE)
            byte = byte.to(tl.int32)
            here = tl.max(tl.where(byte == NAN_BYTE, 0, byte + 1), 1)
            headroom = tl.where((b0 == start) & (here > 0), HEADROOM_MX, 0)
            largest = tl.maximum(largest, tl.minimum(here + headroom, NAN_BYTE))
            scale = tl.maximum(largest - 1, 0)
            blocks = tl.reshape(tl.load(q + at, mask=inside, other=0), (BLOCK_M, BLOCKS, BLOCK_MX))
            folded = fold_tile(blocks, byte, scale[:, None], 2, HW_CAST)
            tl.store(qf + at, tl.reshape(folded, (BLOCK_M, SPAN_MX)), mask=inside)
            tl.store(span_sf + slot * R + r, tl.where(broken, NAN_BYTE, scale).to(tl.uint8), mask=r < R)
            slot += 1
        else:
            tl.store(qf + at, tl.zeros((BLOCK_M, SPAN_MX), tl.uint8), mask=inside)
    for unused in range(slot, end_slot):
        no_scale = tl.zeros((BLOCK_M,), tl.int32) + tl.where(broken, NAN_BYTE, 0)
        tl.store(span_sf + unused * R + r, no_scale.to(tl.uint8), mask=r < R)


def whole_rows(
    op: str,
    argument: str,
    arch: str,
    shape: tuple[int, ...],
    attrs: dict[str, int],
    scalars: dict[str, int] | None = None,
) -> Launch:
    """Outputs and whole-row tiles of qf with this shape, of `argument`; `scalars` if they are not its number of
    rows."""
    *lead, k = shape
    if k == 0:
        allowed = f"allowed: multiples of {BLOCK} from {BLOCK}; a row without blocks has no scale"
        fail(ValueError, op, argument, "K = 0", allowed)
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
    return whole_rows(op, "q", arch, q.shape, {})


def _plan_quantize_fold(
    x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False
) -> Launch:
    op = "quantize_row_fold"
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2, 3)
    require_multiple(op, "x", x.shape[-1], BLOCK, "last dim")
    return whole_rows(op, "x", arch, x.shape, scale_attrs(op, rounding, satfinite))


def _plan_permute_fold(packed: ArrayType, row_map: ArrayType, *, arch: str) -> Launch:
    op = "permute_mx_fold"
    blocks = packed_blocks(op, packed)
    check_map(op, row_map)
    p = row_map.shape[0]
    return whole_rows(op, "packed", arch, (p, blocks * BLOCK), {}, {"R": packed.shape[0], "P": p})


def _plan_fold_groups(q: ArrayType, sf: ArrayType, group_ends: ArrayType, *, arch: str) -> Launch:
    op = "fold_groups"
    require_dtype(op, "q", q, "uint8")
    require_dtype(op, "sf", sf, "uint8")
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "q", q, 2)
    require_rank(op, "group_ends", group_ends, 1)
    r, m = q.shape
    require_multiple(op, "q", m, BLOCK, "last dim")
    require_shape(op, "sf", sf, (r, m // BLOCK), "one scale per 32 values of q's last dim")
    groups = group_ends.shape[0]
    out = (ArrayType(q.shape, "uint8"), ArrayType((spans(m, groups), r), "uint8"))
    if arch == "cpu":
        return Launch(out, ())
    t = tiles(op, arch)
    return Launch(
        out=out,
        attrs=(),
        grid=(cdiv(r, t.m), groups + 1),
        scalars={"R": r, "M": m},
        meta={"G": groups, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


_OUT = ("qf", "row_sf")
fold_rows = KernelOp("fold_rows", _fold_kernel, ("q", "sf"), _OUT, (), _plan_fold)
quantize_row_fold = KernelOp(
    "quantize_row_fold", _quantize_fold_kernel, ("x",), _OUT, ("rounding", "satfinite"), _plan_quantize_fold
)
fold_groups = KernelOp(
    "fold_groups", _fold_groups_kernel, ("q", "sf", "group_ends"), ("qf", "span_sf"), (), _plan_fold_groups
)
permute_mx_fold = KernelOp("permute_mx_fold", _permute_fold_kernel, ("packed", "row_map"), _OUT, (), _plan_permute_fold)
