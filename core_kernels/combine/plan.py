"""Top-k combine: the weighted sum of the K expert rows of each token, and its gradient.

    slots[t, k] = r    row r is slot k of token t; -1 where the slot has no row
    order[r] = t*K + k the inverse of slots: the slot of row r; -1 for padding

    rows (R, D) --combine------> y (T, D)        y[t] = ((0 + p0 * x0) + p1 * x1) + ...  rounded once
    dy (T, D), rows --combine_bwd--> drows (R, D)    drows[r] = p * dy[t], zeros for padding
                                     dprobs (T, K)   dprobs[t, k] = dot(dy[t], rows[slots[t, k]])
    dy (T, D), rows --combine_bwd_row--> drows as q (R, D), sf (R, D/32); dprobs

Probabilities of shape (0,) give an unweighted sum: the gradient of copying a token to its slots.
"""

from ..dispatch import facts
from ..formats import BLOCK, Rounding, scale_attrs
from ..launch import (
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
from ..quantize.plan import SCALES
from ..tiles import cdiv, next_power_of_2, tiles

FLOATS = ("bfloat16", "float32")
UNWEIGHTED = (0,)
"""The shape of `probs` for an unweighted sum."""


def _check_slots(op: str, rows: ArrayType, slots: ArrayType, probs: ArrayType) -> None:
    require_dtype(op, "rows", rows, *FLOATS)
    require_rank(op, "rows", rows, 2)
    require_dtype(op, "slots", slots, "int32")
    require_rank(op, "slots", slots, 2)
    if slots.shape[1] < 1:
        fail(ValueError, op, "slots", f"shape {slots.shape}", "allowed: (T, K), K at least 1")
    require_dtype(op, "probs", probs, "float32")
    if len(probs.shape) != 1 or probs.shape[0] != 0:
        require_shape(op, "probs", probs, slots.shape, "one per slot, or (0,) for an unweighted sum")


def _check_combine(rows: ArrayType, slots: ArrayType, probs: ArrayType, *, out_dtype: str = "bfloat16") -> Signature:
    op = "combine"
    _check_slots(op, rows, slots, probs)
    out = ArrayType((slots.shape[0], rows.shape[1]), out_dtype)
    require_dtype(op, "out_dtype", out, *FLOATS)
    return Signature((out,))


def _tile_combine(call: Call, arch: str) -> Tiling:
    (r, d), (tokens, k) = call.inputs[0].shape, call.inputs[1].shape
    t = tiles(call.op, arch, row_width=d)
    across = cdiv(d, t.k)
    shape = {"D": d, "K": k, "WEIGHTED": call.inputs[2].shape != UNWEIGHTED, "TILES": across}
    blocks = {"HW_CAST": facts(arch).hw_cast, "BLOCK_M": t.m, "BLOCK_K": t.k}
    return t.tiling((cdiv(tokens, t.m) * across,), {"R": r, "T": tokens}, **shape, **blocks)


def _check_gradient(
    op: str, dy: ArrayType, rows: ArrayType, slots: ArrayType, order: ArrayType, probs: ArrayType
) -> None:
    _check_slots(op, rows, slots, probs)
    (r, d), tokens = rows.shape, slots.shape[0]
    require_dtype(op, "dy", dy, *FLOATS)
    require_shape(op, "dy", dy, (tokens, d), "a row per token of slots, as wide as rows")
    require_dtype(op, "order", order, "int32")
    require_shape(op, "order", order, (r,), "the slot of each row")


def _check_combine_bwd(
    dy: ArrayType, rows: ArrayType, slots: ArrayType, order: ArrayType, probs: ArrayType
) -> Signature:
    _check_gradient("combine_bwd", dy, rows, slots, order, probs)
    return Signature((rows, probs))


def _check_combine_bwd_row(
    dy: ArrayType, rows: ArrayType, slots: ArrayType, order: ArrayType, probs: ArrayType,
    *, rounding: Rounding = Rounding.RCEIL, satfinite: bool = False,
) -> Signature:  # fmt: skip
    op = "combine_bwd_row"
    _check_gradient(op, dy, rows, slots, order, probs)
    r, d = rows.shape
    require_multiple(op, "rows", d, BLOCK, "last dim")
    out = ArrayType((r, d), "uint8"), ArrayType((r, d // BLOCK), "uint8"), probs
    return Signature(out, scale_attrs(op, rounding, satfinite))


def _tile_combine_bwd(call: Call, arch: str) -> Tiling:
    """A program per token, which holds all its slots, and programs for the rows of padding."""
    (r, d), (tokens, k), probs = call.inputs[1].shape, call.inputs[2].shape, call.inputs[4]
    t, slots = tiles(call.op, arch), next_power_of_2(k)
    # As many values in flight as the table has: all slots of a token times a part of its columns.
    columns = min(max(t.m * t.k // slots, 32), max(next_power_of_2(d), 32))
    shape = {"D": d, "K": k, "WEIGHTED": probs.shape != UNWEIGHTED}
    blocks = {"HW_CAST": facts(arch).hw_cast, "BLOCK_S": slots, "BLOCK_M": t.m, "BLOCK_K": columns}
    return t.tiling((tokens + cdiv(r, t.m),), {"R": r, "T": tokens}, **shape, **blocks)


combine = KernelOp(
    "combine",
    """The weighted sum of the K rows of each token.

    Args:
        rows: (R, D) bf16 or fp32.
        slots: (T, K) int32, the row of each slot, -1 for none.
        probs: (T, K) fp32, or shape (0,) for an unweighted sum.
        out_dtype: "bfloat16" or "float32".

    Returns:
        y (T, D): y[t] = sum over k of probs[t, k] * rows[slots[t, k]] in fp32, k ascending, rounded once.

    Raises:
        ValueError: shape, on a CPU also a row that does not exist.
        TypeError: dtype.

    Example:
        >>> slots, probs = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([[0.25, 0.5]])
        >>> ops.combine(xp.ones((2, 1)), slots, probs).tolist()
        [[0.75]]
    """,
    ("rows", "slots", "probs"),
    ("y",),
    _check_combine,
    _tile_combine,
    "combine.kernel:combine_kernel",
)
combine_bwd = KernelOp(
    "combine_bwd",
    """The gradients of `combine`.

    Args:
        dy: (T, D) bf16 or fp32.
        rows: (R, D) bf16 or fp32, of `combine`.
        slots: (T, K) int32, of `combine`.
        order: (R,) int32, the inverse of slots: the slot t * K + k of each row, -1 for padding.
        probs: (T, K) fp32, of `combine`; or (0,).

    Returns:
        drows (R, D) in the dtype of rows, zeros for padding, and dprobs (T, K) fp32. With probs of shape (0,) rows is
        not read and dprobs is (0,).

    Raises:
        ValueError: shape, on a CPU also maps that are no inverses.
        TypeError: dtype.

    Example:
        >>> dy, rows, probs = xp.ones((1, 1)), xp.asarray([[1.0], [2.0]]), xp.asarray([[0.5, 0.25]])
        >>> slots, order = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([1, 0], dtype=xp.int32)
        >>> drows, dprobs = ops.combine_bwd(dy, rows, slots, order, probs)
        >>> drows.tolist(), dprobs.tolist()
        ([[0.25], [0.5]], [[2.0, 1.0]])
    """,
    ("dy", "rows", "slots", "order", "probs"),
    ("drows", "dprobs"),
    _check_combine_bwd,
    _tile_combine_bwd,
    "combine.kernel:combine_bwd_kernel",
)
combine_bwd_row = KernelOp(
    "combine_bwd_row",
    f"""`combine_bwd` with the gradient of the rows quantized by `quantize_row`: it is written as 1.03 bytes per value.

    Args:
        dy: (T, D) bf16 or fp32, as for `combine_bwd`. D is a multiple of 32.
        rows: (R, D) bf16 or fp32, as for `combine_bwd`.
        slots: (T, K) int32, as for `combine_bwd`.
        order: (R,) int32, as for `combine_bwd`.
        probs: (T, K) fp32, or (0,), as for `combine_bwd`.
        {SCALES}

    Returns:
        q (R, D) E4M3 and sf (R, D/32) E8M0, uint8: drows in the dtype of rows, quantized; and dprobs (T, K) fp32.

    Raises:
        ValueError: shape, rounding, on a CPU also maps that are no inverses.
        TypeError: dtype.

    Example:
        >>> dy, rows, probs = xp.ones((1, 32)), xp.ones((2, 32)), xp.asarray([[0.5, 0.25]])
        >>> slots, order = xp.asarray([[1, 0]], dtype=xp.int32), xp.asarray([1, 0], dtype=xp.int32)
        >>> drows_q, drows_sf, dprobs = ops.combine_bwd_row(dy, rows, slots, order, probs)
        >>> drows_sf.tolist(), dprobs.tolist()  # 0.25 = 256 * 2^-10
        ([[117], [118]], [[32.0, 32.0]])
    """,
    ("dy", "rows", "slots", "order", "probs"),
    ("q", "sf", "dprobs"),
    _check_combine_bwd_row,
    _tile_combine_bwd,
    "combine.kernel:combine_bwd_row_kernel",
)
