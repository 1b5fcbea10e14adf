"""Top-k combine: every token's weighted sum of its K expert rows, and the way back.

    slots[t, k] = r    row r is slot k of token t; -1 where the slot has no row
    order[r] = t*K + k the way back: the slot that row r fills; -1 for padding

    rows (R, D) --combine------> y (T, D)        y[t] = ((0 + p0 * x0) + p1 * x1) + ...  rounded once
    dy (T, D), rows --combine_bwd--> drows (R, D)    drows[r] = p * dy[t], zeros for padding
                                     dprobs (T, K)   dprobs[t, k] = dot(dy[t], rows[slots[t, k]])

Probabilities of shape (0,) mean an unweighted sum: what the gradient of copying a token to its slots is.
"""

from ..launch import ArrayType, KernelOp, Launch, fail, require_dtype, require_rank, require_shape
from ..tiles import Tiles, cdiv, hw_cast, next_power_of_2, tiles
from . import kernel

FLOATS = ("bfloat16", "float32")


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


combine = KernelOp("combine", kernel.combine_kernel, ("rows", "slots", "probs"), ("y",), (), _plan_combine)
combine_bwd = KernelOp(
    "combine_bwd",
    kernel.combine_bwd_kernel,
    ("dy", "rows", "slots", "order", "probs"),
    ("drows", "dprobs"),
    (),
    _plan_combine_bwd,
)
