"""The quantized definition of the experts' feed-forward and of its gradients.

    gate = x w1^T    up = x w3^T    h = silu(gate) up prob    out = h w2^T
    dh = dout w2     dgate, dup, dprob = gradients of h at dh
    dx = dgate w1 + dup w3    dw1 = dgate^T x    dw3 = dup^T x    dw2 = dout^T h

The operands of each product are quantized in the form of the recipe (products.py). Each product sums in fp64.

value                              is rounded to
gate, up, h, out, dh, dgate, dup   bfloat16
dprob                              float32
dx                                 the dtype of x, after the sum of both products; bfloat16 where x is (q, sf)
dw1, dw3, dw2                      the dtype of the weight

Each group of rows is padded with zeros to a multiple of 32 rows, so that a block along the tokens lies in one group.
"""

from typing import NamedTuple

import numpy as np

from ..formats import BLOCK, Rounding
from ..oracle_math import Array, Pair, round_to
from ..permute.oracle import permute_rows
from ..routing.oracle import row_map
from ..swiglu.oracle import swiglu, swiglu_bwd
from .products import grouped_mm, grouped_mm_vjp

Rows = Array | Pair


class Precision(NamedTuple):
    """How operands are quantized.

    form, wgrad_mx: a line of the table in products.py. rounding: the choice of a scale.
    """

    form: str
    wgrad_mx: bool
    rounding: Rounding | str = Rounding.RCEIL


class Gradients(NamedTuple):
    """dx (P, D), dw1 and dw3 (G, F, D), dw2 (G, D, F), dprob (P,) float32 or (0,)."""

    dx: Array
    dw1: Array
    dw3: Array
    dw2: Array
    dprob: Array


class _Hidden(NamedTuple):
    """Values of the forward in padded groups."""

    x: Rows
    prob: Array
    gate: Array
    up: Array
    h: Array


def _permuted(x: Rows, rows: Array) -> Rows:
    return (permute_rows(x[0], rows), permute_rows(x[1], rows)) if isinstance(x, tuple) else permute_rows(x, rows)


def _permuted_vector(x: Array, rows: Array) -> Array:
    return permute_rows(x[:, None], rows)[:, 0] if len(x) else x


def _padding(group_ends: Array, num_rows: int) -> tuple[Array, Array, Array]:
    """-> the row of each padded row, the padded row of each row, the padded group ends; -1 for none."""
    counts = np.diff(group_ends, prepend=0).astype(np.int32)
    padded_rows, inverse, _, ends = row_map(counts, num_rows, len(counts), BLOCK)
    return padded_rows, inverse, ends


def _product(x: Rows, w: Array, ends: Array, precision: Precision) -> Array:
    """x (P, K) w^T, w (G, N, K) -> (P, N) bfloat16."""
    return grouped_mm(x, np.swapaxes(w, 1, 2), ends, precision.form, precision.rounding)


def _product_vjp(dout: Rows, x: Rows, w: Array, ends: Array, precision: Precision) -> Pair:
    """dout (P, N) -> the gradients of x (P, K) and of w (G, N, K), in fp64."""
    dx, dw_t = grouped_mm_vjp(dout, x, np.swapaxes(w, 1, 2), ends, *precision, out_dtype="float64")
    return dx, np.swapaxes(dw_t, 1, 2)


def _forward(x: Rows, w1: Array, w3: Array, prob: Array, rows: Array, ends: Array, precision: Precision) -> _Hidden:
    x, prob = _permuted(x, rows), _permuted_vector(prob, rows)
    gate, up = (_product(x, w, ends, precision) for w in (w1, w3))
    return _Hidden(x, prob, gate, up, swiglu(gate, up, prob))


def swiglu_ffn(x: Rows, w1: Array, w3: Array, w2: Array, group_ends: Array, prob: Array, precision: Precision) -> Array:
    """x (P, D) bfloat16, float32 or its (q, sf) -> out (P, D) bfloat16; rows past the last end are zeros.

    w1, w3 (G, F, D), w2 (G, D, F). prob (P,) float32, or (0,): each row of h weighs one.
    """
    rows, inverse, ends = _padding(group_ends, len(x[0]) if isinstance(x, tuple) else len(x))
    h = _forward(x, w1, w3, prob, rows, ends, precision).h
    return permute_rows(_product(h, w2, ends, precision), inverse)


def swiglu_ffn_vjp(
    dout: Rows, x: Rows, w1: Array, w3: Array, w2: Array, group_ends: Array, prob: Array, precision: Precision
) -> Gradients:
    """dout (P, D) bfloat16 or its (q, sf) -> the gradients of x, the weights and prob."""
    mx = isinstance(x, tuple)
    rows, inverse, ends = _padding(group_ends, len(x[0]) if mx else len(x))
    hidden, dout = _forward(x, w1, w3, prob, rows, ends, precision), _permuted(dout, rows)
    dh, dw2 = _product_vjp(dout, hidden.h, w2, ends, precision)
    dgate, dup, dprob = swiglu_bwd(round_to(dh, "bfloat16"), hidden.gate, hidden.up, hidden.prob)
    dx_gate, dw1 = _product_vjp(dgate, hidden.x, w1, ends, precision)
    dx_up, dw3 = _product_vjp(dup, hidden.x, w3, ends, precision)
    dx = round_to(dx_gate + dx_up, "bfloat16" if mx else x.dtype.name)
    dw1, dw3, dw2 = (round_to(dw, w.dtype.name) for dw, w in ((dw1, w1), (dw3, w3), (dw2, w2)))
    return Gradients(permute_rows(dx, inverse), dw1, dw3, dw2, _permuted_vector(dprob, inverse))
