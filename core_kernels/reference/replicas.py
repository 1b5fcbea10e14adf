"""The rows of a token's replicas, summed on the ranks of their experts before they return, in numpy: exact bytes.

rows --fp32 sum of the rows on rank r, k ascending--> dtype of the rows, as combine sends them --+
                                                                                                 | r = 0, 1, ...
y <-- rounded once <-- fp32 sum, r ascending <---------------------------------------------------+
"""

import numpy as np

from ..combine.oracle import combine
from ..formats import Rounding
from ..oracle_math import DTYPES, Array
from ..quantize.oracle import dequantize, quantize_row

UNWEIGHTED = np.zeros(0, np.float32)


def as_sent(rows: Array, mx: bool, rounding: Rounding = Rounding.RCEIL) -> Array:
    """The values of rows after an all-to-all, in MXFP8 or as they are."""
    return dequantize(*quantize_row(rows, rounding), dtype_of(rows)) if mx else rows


def dtype_of(rows: Array) -> str:
    return next(name for name, kept in DTYPES.items() if kept == rows.dtype)


def sum_by_rank(
    rows: Array, slots: Array, probs: Array, rank_of: Array, out_dtype: str = "bfloat16", mx: bool = False,
    rounding: Rounding = Rounding.RCEIL,
) -> Array:  # fmt: skip
    """rows (R, D), slots (T, K), probs (T, K) or (0,) of `combine`, rank_of (T, K): the rank of each row -> y (T, D).

    mx: a rank's sums are sent in MXFP8. A rank without a row of a token adds nothing.
    """
    tokens, ranks = len(slots), range(rank_of.max(initial=0) + 1)
    of_ranks = [np.where(rank_of == r, slots, -1) for r in ranks]
    sums = [combine(rows, of_rank, probs, dtype_of(rows)) for of_rank in of_ranks]
    sent = as_sent(np.concatenate(sums), mx, rounding)
    row = [np.where((of_rank >= 0).any(1), r * tokens + np.arange(tokens), -1) for r, of_rank in enumerate(of_ranks)]
    return combine(sent, np.stack(row, 1), UNWEIGHTED, out_dtype)
