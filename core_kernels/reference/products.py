"""The grouped product and its gradients by definition, in each operand form of a recipe.

    out = a b        a along K, b along K          db = a^T dout    both along the tokens
    da  = dout b^T   dout along N, b along N

form      along the rows                  along the tokens, if `wgrad_mx`; otherwise bf16
"bf16"    bf16                            -
"mx"      quantize_row, quantize_col      quantize_col
"fold"    the same, folded by row         the same, folded by row and span of tokens
"row"     quantize_rowwise                -
"block"   quantize_blockwise; weights: quantize_squares, transposed for da; with powers of two in form
          "block_power_of_two". Along the tokens as form "fold"

An operand (q, sf) is multiplied as it is in form "mx", folded in form "fold", and dequantized in the other forms.

sums: "exact", or "sm_90" for sums as of Hopper's FP8 tensor cores in every form but "bf16" and "mx"
(../grouped_gemm/folded/oracle_sm90.py).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..fold.oracle import fold_groups, fold_rows
from ..formats import WEIGHT_HEADROOM, Rounding
from ..grouped_gemm.blockwise import oracle as oracle_blockwise
from ..grouped_gemm.exact.oracle import grouped_mm_bf16, grouped_mm_mx, grouped_wgrad_bf16, grouped_wgrad_mx
from ..grouped_gemm.folded import oracle as oracle_folded
from ..grouped_gemm.folded import oracle_sm90
from ..oracle_math import Array, Pair, round_to
from ..quantize.oracle import dequantize, quantize_col, quantize_row, quantize_rowwise
from ..quantize.oracle_blockwise import quantize_blockwise, quantize_squares


class _Products(NamedTuple):
    fold: Callable[..., Array]
    fold_wgrad: Callable[..., Array]
    blockwise: Callable[..., Array]


_PRODUCTS = {
    "exact": _Products(
        oracle_folded.grouped_mm_fold,
        oracle_folded.grouped_wgrad_fold,
        oracle_blockwise.grouped_mm_blockwise,
    ),
    "sm_90": _Products(
        oracle_sm90.grouped_mm_fold,
        oracle_sm90.grouped_wgrad_fold,
        oracle_sm90.grouped_mm_blockwise,
    ),
}


def _values(x: Array | Pair) -> Array:
    return dequantize(x[0], x[1]) if isinstance(x, tuple) else x


def _as_bf16(x: Array | Pair) -> Array:
    return round_to(_values(x).astype(np.float64), "bfloat16")


def _rows(x: Array | Pair, form: str, rounding: Rounding | str, headroom: int = 0) -> Pair:
    if form == "row":
        return quantize_rowwise(_values(x), rounding)
    q, sf = x if isinstance(x, tuple) else quantize_row(x, rounding)
    return fold_rows(q, sf, headroom) if form == "fold" else (q, sf)


def _product(
    x: Array | Pair, w: Array, group_ends: Array, form: str, rounding: Rounding | str, sums: str, dtype: str
) -> Array:
    """x along its last dim, w (G, N, K) along its last."""
    products = _PRODUCTS[sums]
    if form == "bf16":
        return grouped_mm_bf16(_as_bf16(x), _as_bf16(w), group_ends, dtype)
    if form.startswith("block"):
        powers = form == "block_power_of_two"
        q, sf = quantize_blockwise(_values(x), powers)
        w_q, w_sf = quantize_squares(w, powers)
        return products.blockwise(q, sf, w_q, w_sf, group_ends, dtype)
    multiply = grouped_mm_mx if form == "mx" else products.fold
    q, sf = _rows(x, form, rounding)
    w_q, w_sf = _rows(w, form, rounding, WEIGHT_HEADROOM)
    return multiply(q, sf, w_q, w_sf, group_ends, dtype)


def grouped_mm(
    a: Array | Pair,
    b_t: Array,
    group_ends: Array,
    form: str,
    rounding: Rounding | str = Rounding.RCEIL,
    sums: str = "exact",
    out_dtype: str = "bfloat16",
) -> Array:
    """a (M, K) floats or its (q, sf), b_t (G, K, N) floats -> out (M, N)."""
    return _product(a, np.ascontiguousarray(np.swapaxes(b_t, 1, 2)), group_ends, form, rounding, sums, out_dtype)


def grouped_mm_vjp(
    dout: Array | Pair,
    a: Array | Pair,
    b_t: Array,
    group_ends: Array,
    form: str,
    wgrad_mx: bool,
    rounding: Rounding | str = Rounding.RCEIL,
    sums: str = "exact",
    out_dtype: str = "bfloat16",
) -> Pair:
    """dout (M, N), floats or its (q, sf) -> da (M, K), db_t (G, K, N)."""
    da = _product(dout, np.ascontiguousarray(b_t), group_ends, form, rounding, sums, out_dtype)
    if not wgrad_mx:
        db = grouped_wgrad_bf16(_as_bf16(dout), _as_bf16(a), group_ends, out_dtype)
        return da, np.swapaxes(db, 1, 2)
    dout_q, dout_sf = quantize_col(_values(dout), rounding)
    a_q, a_sf = quantize_col(_values(a), rounding)
    multiply = grouped_wgrad_mx
    if form != "mx":
        dout_q, dout_sf = fold_groups(dout_q, dout_sf, group_ends)
        a_q, a_sf = fold_groups(a_q, a_sf, group_ends)
        multiply = _PRODUCTS[sums].fold_wgrad
    return da, np.swapaxes(multiply(dout_q, dout_sf, a_q, a_sf, group_ends, out_dtype), 1, 2)
