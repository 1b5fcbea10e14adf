"""Top-k combine: every token's weighted sum of its K expert rows, and the way back.

    slots[t, k] = r    row r is slot k of token t; -1 where the slot has no row
    order[r] = t*K + k the way back: the slot that row r fills; -1 for padding

    rows (R, D) --combine------> y (T, D)        y[t] = ((0 + p0 * x0) + p1 * x1) + ...  rounded once
    dy (T, D), rows --combine_bwd--> drows (R, D)    drows[r] = p * dy[t], zeros for padding
                                     dprobs (T, K)   dprobs[t, k] = dot(dy[t], rows[slots[t, k]])

Probabilities of shape (0,) mean an unweighted sum: what the gradient of copying a token to its slots is.

Both ways are token-major. Forward, a program owns a few tokens and a tile of columns. Backward, it owns one token
and all its columns: dy is read once for the K rows, and dprobs is one program's sum, in a fixed order. The padding
rows are the last programs of the same launch. Memory-bound; rows are addressed with 64 bits.
"""

import triton
import triton.language as tl

from .launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_rank, require_shape
from .mx_math import f32_to_bf16, to_f32
from .tiles import Tiles, cdiv, hw_cast, next_power_of_2, tiles

FLOATS = ("bfloat16", "float32")


@triton.jit
def _store(out, value, mask, HW_CAST: tl.constexpr):
    """f32 values, rounded to bf16 where `out` points to that."""
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out, f32_to_bf16(value, HW_CAST), mask=mask)
    else:
        tl.store(out, value, mask=mask)


@triton.jit
def _combine_kernel(
    rows, slots, probs, R, T, y,
    D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, TILES: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of y (T, D); TILES tiles lie side by side."""
    tile = tl.program_id(0)
    t = (tile // TILES).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = (tile % TILES) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(slots + t * K + k, mask=t < T, other=-1).to(tl.int64)
        tl.device_assert((row >= -1) & (row < R), "slots point outside the rows")
        real = (row >= 0) & (row < R)
        x = to_f32(tl.load(rows + row[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0))
        # A slot without a row adds 0, which leaves acc as it is: a sum that starts at +0 is never -0.
        if WEIGHTED:
            p = tl.load(probs + t * K + k, mask=real, other=0.0)
            acc += p[:, None] * x
        else:
            acc += x
    _store(y + t[:, None] * D + d[None, :], acc, (t < T)[:, None] & (d < D)[None, :], HW_CAST)


@triton.jit
def _token(
    dy, rows, slots, probs, R, t, drows, dprobs,
    D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The BLOCK_S >= K slots of token t: their rows of drows and their dprobs."""
    k = tl.arange(0, BLOCK_S)
    row = tl.load(slots + t * K + k, mask=k < K, other=-1).to(tl.int64)
    tl.device_assert((row >= -1) & (row < R), "slots point outside the rows")
    real = (row >= 0) & (row < R)
    dots = tl.zeros((BLOCK_S, BLOCK_K), tl.float32)
    if WEIGHTED:
        p = tl.load(probs + t * K + k, mask=real, other=0.0)
    for d0 in range(0, D, BLOCK_K):
        d = d0 + tl.arange(0, BLOCK_K)
        inside = real[:, None] & (d < D)[None, :]
        place = row[:, None] * D + d[None, :]
        g = to_f32(tl.load(dy + t * D + d, mask=d < D, other=0.0))[None, :]
        if WEIGHTED:
            x = to_f32(tl.load(rows + place, mask=inside, other=0.0))
            # Where there is no row, an infinity of dy must not meet the zero that stands for it.
            dots += tl.where(inside, g * x, 0.0)
            _store(drows + place, p[:, None] * g, inside, HW_CAST)
        else:
            _store(drows + place, tl.broadcast_to(g, (BLOCK_S, BLOCK_K)), inside, HW_CAST)
    if WEIGHTED:
        tl.store(dprobs + t * K + k, tl.sum(dots, 1), mask=k < K)


@triton.jit
def _padding(order, R, first, drows, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Zeros in those of BLOCK_M rows that no slot fills."""
    r = first + tl.arange(0, BLOCK_M)
    empty = tl.load(order + r, mask=r < R, other=0) < 0
    if tl.max(empty.to(tl.int32), 0) > 0:
        for d0 in range(0, D, BLOCK_K):
            d = d0 + tl.arange(0, BLOCK_K)
            zeros = tl.zeros((BLOCK_M, BLOCK_K), drows.dtype.element_ty)
            tl.store(drows + r[:, None] * D + d[None, :], zeros, mask=empty[:, None] & (d < D)[None, :])


@triton.jit
def _combine_bwd_kernel(
    dy, rows, slots, order, probs, R, T, drows, dprobs,
    D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr,
    HW_CAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The first T programs own a token each, the rest BLOCK_M rows each."""
    i = tl.program_id(0)
    if i < T:
        _token(
            dy, rows, slots, probs, R, i.to(tl.int64), drows, dprobs, D, K, WEIGHTED, HW_CAST, BLOCK_S, BLOCK_K
        )  # fmt: skip
    else:
        _padding(order, R, (i - T).to(tl.int64) * BLOCK_M, drows, D, BLOCK_M, BLOCK_K)


def _weighted(op: str, slots: ArrayType, probs: ArrayType) -> bool:
    """Whether there are probabilities, one a slot; raises unless they fit `slots` or have shape (0,)."""
    require_dtype(op, "slots", slots, "int32")
    require_rank(op, "slots", slots, 2)
    if slots.shape[1] < 1:
        fail(ValueError, op, "slots", f"shape {slots.shape}", "allowed: (T, K), K at least 1")
    require_dtype(op, "probs", probs, "float32")
    if len(probs.shape) == 1 and probs.shape[0] == 0:
        return False
    require_shape(op, "probs", probs, slots.shape, "one per slot, or (0,) for an unweighted sum")
    return True


def _plan_combine(
    rows: ArrayType, slots: ArrayType, probs: ArrayType, *, arch: str, out_dtype: str = "bfloat16"
) -> Launch:
    op = "combine"
    require_dtype(op, "rows", rows, *FLOATS)
    require_rank(op, "rows", rows, 2)
    weighted = _weighted(op, slots, probs)
    (r, d), (t, k) = rows.shape, slots.shape
    out = ArrayType((t, d), out_dtype)
    require_dtype(op, "out_dtype", out, *FLOATS)
    if arch == "cpu":
        return Launch((out,), ())
    tile = tiles(op, arch, row_width=d)
    d_tiles = cdiv(d, tile.k)
    return Launch(
        out=(out,),
        attrs=(),
        grid=(cdiv(t, tile.m) * d_tiles,),
        scalars={"R": r, "T": t},
        meta={
            "D": d, "K": k, "WEIGHTED": weighted, "TILES": d_tiles,
            "HW_CAST": hw_cast(arch), "BLOCK_M": tile.m, "BLOCK_K": tile.k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def _token_tiles(arch: str, slots: int, width: int) -> Tiles:
    """The table's m x k values in flight, as all the slots of a token x a part of its columns."""
    t = tiles("combine_bwd", arch)
    return t._replace(k=min(max(t.m * t.k // slots, 32), max(next_power_of_2(width), 32)))


def _plan_combine_bwd(
    dy: ArrayType, rows: ArrayType, slots: ArrayType, order: ArrayType, probs: ArrayType, *, arch: str
) -> Launch:
    op = "combine_bwd"
    require_dtype(op, "rows", rows, *FLOATS)
    require_rank(op, "rows", rows, 2)
    weighted = _weighted(op, slots, probs)
    (r, d), (t, k) = rows.shape, slots.shape
    require_dtype(op, "dy", dy, *FLOATS)
    require_shape(op, "dy", dy, (t, d), "a row per token of slots, as wide as rows")
    require_dtype(op, "order", order, "int32")
    require_shape(op, "order", order, (r,), "the slot of each row")
    out = (rows, probs)
    if arch == "cpu":
        return Launch(out, ())
    block_s = next_power_of_2(k)
    tile = _token_tiles(arch, block_s, d)
    return Launch(
        out=out,
        attrs=(),
        grid=(t + cdiv(r, tile.m),),
        scalars={"R": r, "T": t},
        meta={
            "D": d, "K": k, "WEIGHTED": weighted,
            "HW_CAST": hw_cast(arch), "BLOCK_S": block_s, "BLOCK_M": tile.m, "BLOCK_K": tile.k,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


combine = KernelOp("combine", _combine_kernel, ("rows", "slots", "probs"), ("y",), (), _plan_combine)
combine_bwd = KernelOp(
    "combine_bwd",
    _combine_bwd_kernel,
    ("dy", "rows", "slots", "order", "probs"),
    ("drows", "dprobs"),
    (),
    _plan_combine_bwd,
)
