"""Both folded operands of an activation from two reads of it: by row at once, by column and group later.

    x (M, K) --quantize_row_fold_col_scales--> qf (M, K), row_sf (M,)    what out = x w^T multiplies
                  |                            col_sf (M/32, K)
                  |                  group_ends (G,) --group_scales--> group_sf (G, K)
                  |                                                         |
    x (M, K) -----'----------------------------------quantize_col_fold------'--> qf_t (K, M)   dw = dout^T x

A group's columns have one scale, their largest, which must be known before the first code is written. The pass along
the rows reads all of x anyway and leaves the columns' scales behind, a 32nd of a byte per value, so the pass along
the columns writes folded codes at once. `quantize_col` and `fold_groups` give the same bytes, and between them every
code is written and read once more.

              |<------------ K ------------>|
    row 0     v v v v ...                 v  --> qf, row_sf      a program walks 32 rows, and holds the largest
    row 1     v v v v ...                 v  --> qf, row_sf      magnitude so far of each of the K columns
    ...
    row 31    v v v v ...                 v  --> qf, row_sf
              '-' largest magnitude              --> col_sf, one row of K bytes
"""

import triton
import triton.language as tl

from .fold import NAN_BYTE, fold_tile, store_folded
from .formats import BLOCK, Rounding
from .launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_multiple, require_rank, require_shape
from .mx_math import BLOCK_MX, quantize_blocks, scale_byte, to_f32
from .quantize import FLOATS
from .tiles import cdiv, hw_cast, next_power_of_2, row_tiles, tiles


@triton.jit
def _row_fold_col_scales_kernel(
    x, M, qf, row_sf, col_sf,
    K: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of 32 rows."""
    block, k, kb = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // BLOCK_MX)
    largest = tl.zeros((BLOCK_K,), tl.int32)
    following = tl.load(x + block * BLOCK_MX * K + k, mask=k < K, other=0.0)
    for row in range(BLOCK_MX):
        m = block * BLOCK_MX + row
        v = to_f32(following)
        # Under way while this row is folded. Through registers: copied to shared memory a thread's 16 bytes would be
        # half of each sector, and every sector would leave L2 twice.
        following = tl.load(x + (m + 1) * K + k, mask=(k < K) & (row + 1 < BLOCK_MX), other=0.0)
        # Magnitudes order as their bits do, NaN above infinity.
        largest = tl.maximum(largest, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        blocks = tl.reshape(v, (1, BLOCK_K // BLOCK_MX, BLOCK_MX))
        q_blocks, sf_tile = quantize_blocks(blocks, 2, rounding, satfinite, HW_CAST)
        store_folded(q_blocks, sf_tile, m + tl.arange(0, 1), k, kb, M, qf, row_sf, K, HW_CAST, 1, BLOCK_K)
    tl.store(col_sf + block * K + k, scale_byte(largest, rounding, satfinite).to(tl.uint8), mask=k < K)


@triton.jit
def _group_scales_kernel(
    col_sf, group_ends, B, group_sf,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Some columns of one group; a NaN block has no say."""
    k, group = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K), tl.program_id(1)
    start = tl.minimum(tl.load(group_ends + group - 1, mask=group > 0, other=0) // BLOCK_MX, B)
    end = tl.minimum(tl.load(group_ends + group) // BLOCK_MX, B)
    largest = tl.full((BLOCK_K,), -1, tl.int32)
    for b0 in range(start, end, BLOCK_M):
        b = (b0 + tl.arange(0, BLOCK_M)).to(tl.int64)
        inside = (b < end)[:, None] & (k < K)[None, :]
        byte = tl.load(col_sf + b[:, None] * K + k[None, :], mask=inside, other=NAN_BYTE)
        largest = tl.maximum(largest, tl.max(tl.where(byte == NAN_BYTE, -1, byte.to(tl.int32)), 0))
    scale = tl.where(start < end, tl.where(largest < 0, NAN_BYTE, largest), 0)
    tl.store(group_sf + group.to(tl.int64) * K + k, scale.to(tl.uint8), mask=k < K)


@triton.jit
def _col_fold_kernel(
    x, group_sf, group_ends, M, qf_t,
    K: tl.constexpr, G: tl.constexpr, rounding: tl.constexpr, satfinite: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One tile of x, transposed; each block of 32 rows looks up the group that it is of, G past the last end."""
    BLOCKS: tl.constexpr = BLOCK_M // BLOCK_MX
    tile = tl.program_id(0)
    k_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    m0, k0 = (tile // k_tiles).to(tl.int64) * BLOCK_M, (tile % k_tiles) * BLOCK_K
    m, k, g = m0 + tl.arange(0, BLOCK_M), k0 + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_G)
    b = m0 // BLOCK_MX + tl.arange(0, BLOCKS)

    ends = tl.load(group_ends + g, mask=g < G, other=0) // BLOCK_MX
    group = tl.sum(((ends[None, :] <= b[:, None]) & (g < G)[None, :]).to(tl.int32), 1)
    in_group = (group < G)[:, None]
    scale = tl.load(group_sf + group[:, None] * K + k[None, :], mask=in_group & (k < K)[None, :], other=0)

    v = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
    blocks = tl.reshape(to_f32(v), (BLOCKS, BLOCK_MX, BLOCK_K))
    q_blocks, byte = quantize_blocks(blocks, 1, rounding, satfinite, HW_CAST)
    folded = fold_tile(q_blocks, byte.to(tl.int32), scale.to(tl.int32), 1, HW_CAST)
    folded = tl.where(in_group[:, :, None], folded, 0).to(tl.uint8)
    width = M // BLOCK_MX * BLOCK_MX  # M, in a form that shows the compiler how rows of qf_t are aligned
    turned = tl.trans(tl.reshape(folded, (BLOCK_M, BLOCK_K)))
    tl.store(qf_t + k[:, None].to(tl.int64) * width + m[None, :], turned, mask=(k < K)[:, None] & (m < width)[None, :])


def _check_matrix(op: str, x: ArrayType) -> tuple[int, int]:
    require_dtype(op, "x", x, *FLOATS)
    require_rank(op, "x", x, 2)
    require_multiple(op, "x", x.shape[0], BLOCK, "dim 0 (scaled along)", "pad the groups, see `row_map`")
    m, k = x.shape
    return m, k


def _check_ends(op: str, group_ends: ArrayType) -> int:
    require_dtype(op, "group_ends", group_ends, "int32")
    require_rank(op, "group_ends", group_ends, 1)
    return group_ends.shape[0]


def _attrs(rounding: Rounding, satfinite: bool) -> dict[str, int]:
    return {"rounding": int(Rounding(rounding)), "satfinite": int(satfinite)}


def _plan_row(x: ArrayType, *, arch: str, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False) -> Launch:
    op = "quantize_row_fold_col_scales"
    m, k = _check_matrix(op, x)
    require_multiple(op, "x", k, BLOCK, "last dim")
    if k == 0:
        fail(ValueError, op, "K", 0, f"allowed: multiples of {BLOCK} from {BLOCK}; a row without blocks has no scale")
    out = (ArrayType((m, k), "uint8"), ArrayType((m,), "uint8"), ArrayType((m // BLOCK, k), "uint8"))
    attrs = _attrs(rounding, satfinite)
    if arch == "cpu":
        return Launch(out, tuple(attrs.values()))
    t = row_tiles(op, arch, k)
    return Launch(
        out=out,
        attrs=tuple(attrs.values()),
        grid=(m // BLOCK,),
        scalars={"M": m},
        meta={"K": k, **attrs, "HW_CAST": hw_cast(arch), "BLOCK_K": t.k},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


def _plan_group_scales(col_sf: ArrayType, group_ends: ArrayType, *, arch: str) -> Launch:
    op = "group_scales"
    require_dtype(op, "col_sf", col_sf, "uint8")
    require_rank(op, "col_sf", col_sf, 2)
    (b, k), groups = col_sf.shape, _check_ends(op, group_ends)
    out = (ArrayType((groups, k), "uint8"),)
    if arch == "cpu":
        return Launch(out, ())
    t = tiles(op, arch, row_width=k)
    return Launch(
        out=out,
        attrs=(),
        grid=(cdiv(k, t.k), groups),
        scalars={"B": b},
        meta={"K": k, "BLOCK_M": t.m, "BLOCK_K": t.k},
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )


def _plan_col(
    x: ArrayType,
    group_sf: ArrayType,
    group_ends: ArrayType,
    *,
    arch: str,
    rounding: Rounding = Rounding.RCEIL,
    satfinite: bool = False,
) -> Launch:
    op = "quantize_col_fold"
    (m, k), groups = _check_matrix(op, x), _check_ends(op, group_ends)
    require_dtype(op, "group_sf", group_sf, "uint8")
    require_shape(op, "group_sf", group_sf, (groups, k), "one scale per group and column of x")
    out, attrs = (ArrayType((k, m), "uint8"),), _attrs(rounding, satfinite)
    if arch == "cpu":
        return Launch(out, tuple(attrs.values()))
    t = tiles(op, arch, row_width=k)
    return Launch(
        out=out,
        attrs=tuple(attrs.values()),
        grid=(cdiv(m, t.m) * cdiv(k, t.k),),
        scalars={"M": m},
        meta={
            "K": k, "G": groups, **attrs, "HW_CAST": hw_cast(arch), "BLOCK_M": t.m, "BLOCK_K": t.k,
            "BLOCK_G": next_power_of_2(groups),
        },
        num_warps=t.num_warps,
        num_stages=t.num_stages,
    )  # fmt: skip


_ATTRS = ("rounding", "satfinite")
quantize_row_fold_col_scales = KernelOp(
    "quantize_row_fold_col_scales", _row_fold_col_scales_kernel, ("x",), ("qf", "row_sf", "col_sf"), _ATTRS, _plan_row
)
group_scales = KernelOp(
    "group_scales", _group_scales_kernel, ("col_sf", "group_ends"), ("group_sf",), (), _plan_group_scales
)
quantize_col_fold = KernelOp(
    "quantize_col_fold", _col_fold_kernel, ("x", "group_sf", "group_ends"), ("qf_t",), _ATTRS, _plan_col
)
