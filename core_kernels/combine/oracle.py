"""The definition of the top-k combine and of its gradient, in numpy.

combine                    bytes, exact
combine_bwd    drows       bytes, exact
               dprobs      sums in fp64, rounded once
combine_bwd_row  the same, drows quantized
"""

import numpy as np

from ..formats import Rounding
from ..oracle_math import DTYPES, Array, Pair, round_to
from ..quantize.oracle import quantize_row


def combine(rows: Array, slots: Array, probs: Array, out_dtype: str = "bfloat16") -> Array:
    """rows (R, D), slots (T, K), probs (T, K) or (0,) -> y (T, D), y[t] = sum over k of probs * rows[slots].

    Computed in fp32 from +0 with ascending k; every product and every sum rounds. A slot of -1 adds nothing.
    """
    acc = np.zeros((len(slots), rows.shape[1]), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for t, k in np.argwhere(slots >= 0):  # k ascending within each t
            x = rows[slots[t, k]].astype(np.float32)
            acc[t] = acc[t] + (probs[t, k] * x if probs.ndim == 2 else x)
    return round_to(acc.astype(np.float64), out_dtype)


def combine_bwd(dy: Array, rows: Array, slots: Array, order: Array, probs: Array) -> Pair:
    """dy (T, D), order (R,) -> drows (R, D) in the dtype of rows, dprobs (T, K) fp32 (or (0,)).

    drows[r] = p * dy[t] for the slot order[r] = t * K + k, zeros where that is -1.
    """
    num_slots, weighted = slots.shape[1], probs.ndim == 2
    drows, dprobs = np.zeros(rows.shape, np.float32), np.zeros(probs.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for r in np.flatnonzero(order >= 0):
            t, k = divmod(int(order[r]), num_slots)
            g = dy[t].astype(np.float32)
            drows[r] = probs[t, k] * g if weighted else g
            if weighted:
                dprobs[t, k] = dy[t].astype(np.float64) @ rows[r].astype(np.float64)
    dtype = next(name for name, kept in DTYPES.items() if kept == rows.dtype)
    return round_to(drows.astype(np.float64), dtype), round_to(dprobs, "float32")


def combine_bwd_row(
    dy: Array, rows: Array, slots: Array, order: Array, probs: Array,
    rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """-> q (R, D), sf (R, D/32) of quantize_row(drows), dprobs."""
    drows, dprobs = combine_bwd(dy, rows, slots, order, probs)
    return *quantize_row(drows, rounding, satfinite), dprobs
