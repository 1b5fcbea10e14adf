"""The quantized definition of the experts' feed-forward and of its gradients.

    gate = x w1^T + b1    up = x w3^T + b3    h = silu(gate) up prob    out = h w2^T + prob b2
    dh = dout w2     dgate, dup, dprob = gradients of h at dh; dprob += dout b2
    dx = dgate w1 + dup w3    dw1 = dgate^T x    dw3 = dup^T x    dw2 = dout^T h
    db1, db3 = sums of dgate and dup over a group's rows    db2 = the sum of prob dout

The operands of each product are quantized in the form of the recipe (products.py). Each product sums in fp64, or as
Hopper's FP8 tensor cores do.

value                              is rounded to
gate, up, h, out, dh, dgate, dup   bfloat16, a bias added before
dprob, db1, db3, db2               float32; h's part of dprob before b2's is added
dx                                 the dtype of x, after the sum of both products; bfloat16 where x is (q, sf)
dw1, dw3, dw2                      the dtype of the weight

Each group of rows is padded to a multiple of 32 rows, so that a block along the tokens is within one group. The padding
is zero in x, gate, up and h: it has no bias.
"""

from typing import NamedTuple

import numpy as np

from ..formats import BLOCK, Rounding
from ..oracle_math import Array, Pair, round_to
from ..permute.oracle import permute_rows
from ..quantize.oracle import dequantize
from ..routing.oracle import row_map
from ..swiglu.oracle import swiglu, swiglu_bwd
from .products import grouped_mm, grouped_mm_vjp

Rows = Array | Pair


class Precision(NamedTuple):
    """How operands are quantized.

    form, wgrad_mx: a line of the table in products.py. rounding: the choice of a scale. sums: of the products there.
    """

    form: str
    wgrad_mx: bool
    rounding: Rounding | str = Rounding.RCEIL
    sums: str = "exact"


NUMBERS = {"alpha": 1.0, "limit": 0.0, "offset": 0.0}
"""Of silu(gate) * up."""


class Epilogues(NamedTuple):
    """Operations after the GEMMs: b1 and b3 (G, F), b2 (G, D) float32, or None; alpha, limit and offset of SwiGLU."""

    b1: Array | None = None
    b3: Array | None = None
    b2: Array | None = None
    numbers: tuple[float, ...] = tuple(NUMBERS.values())


PLAIN = Epilogues()


class Gradients(NamedTuple):
    """dx (P, D), dw1 and dw3 (G, F, D), dw2 (G, D, F), dprob (P,) float32 or (0,), db1 and db3 (G, F), db2 (G, D)."""

    dx: Array
    dw1: Array
    dw3: Array
    dw2: Array
    dprob: Array
    db1: Array
    db3: Array
    db2: Array


class _Hidden(NamedTuple):
    """Values of the forward in padded groups. group (P',): of each row; -1 for padding and past the last end."""

    x: Rows
    prob: Array
    group: Array
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


def _product(x: Rows, w: Array, ends: Array, precision: Precision, bias: Array | float = 0.0) -> Array:
    """x (P, K) w^T + bias, w (G, N, K), bias of each row -> (P, N) bfloat16."""
    form, _, rounding, sums = precision
    products = grouped_mm(x, np.swapaxes(w, 1, 2), ends, form, rounding, sums, "float64")
    return round_to(products + bias, "bfloat16")


def _of_rows(bias: Array | None, group: Array) -> Array | float:
    """bias (G, N) -> (P', N) float64, zeros where there is no group."""
    return 0.0 if bias is None else np.where(group[:, None] < 0, 0.0, bias.astype(np.float64)[group])


def _group_sums(x: Array, group: Array, groups: int) -> Array:
    """x (P', N) -> (G, N) float32, sums in fp64."""
    sums = [x[group == g].astype(np.float64).sum(0) for g in range(groups)]
    return round_to(np.stack(sums), "float32")


def _product_vjp(dout: Rows, x: Rows, w: Array, ends: Array, precision: Precision) -> Pair:
    """dout (P, N) -> the gradients of x (P, K) and of w (G, N, K), in fp64."""
    form, wgrad_mx, rounding, sums = precision
    dx, dw_t = grouped_mm_vjp(dout, x, np.swapaxes(w, 1, 2), ends, form, wgrad_mx, rounding, sums, "float64")
    return dx, np.swapaxes(dw_t, 1, 2)


def _forward(
    x: Rows, w1: Array, w3: Array, prob: Array, rows: Array, ends: Array, precision: Precision, after: Epilogues
) -> _Hidden:
    x, prob = _permuted(x, rows), _permuted_vector(prob, rows)
    group = np.searchsorted(ends, np.arange(len(rows)), side="right")
    group = np.where((rows < 0) | (group == len(ends)), -1, group)
    gate, up = (_product(x, w, ends, precision, _of_rows(b, group)) for w, b in ((w1, after.b1), (w3, after.b3)))
    alpha, limit, offset = after.numbers
    return _Hidden(x, prob, group, gate, up, swiglu(gate, up, prob, alpha, limit, offset))


def swiglu_ffn(
    x: Rows, w1: Array, w3: Array, w2: Array, group_ends: Array, prob: Array, precision: Precision,
    after: Epilogues = PLAIN,
) -> Array:  # fmt: skip
    """x (P, D) bfloat16, float32 or its (q, sf) -> out (P, D) bfloat16; rows past the last end are zeros.

    w1, w3 (G, F, D), w2 (G, D, F). prob (P,) float32, or (0,): each row of h and of b2 weighs one.
    """
    rows, inverse, ends = _padding(group_ends, len(x[0]) if isinstance(x, tuple) else len(x))
    hidden = _forward(x, w1, w3, prob, rows, ends, precision, after)
    bias = _of_rows(after.b2, hidden.group)
    if len(prob) and after.b2 is not None:
        bias = np.where(hidden.group[:, None] < 0, 0.0, bias * hidden.prob[:, None].astype(np.float64))
    return permute_rows(_product(hidden.h, w2, ends, precision, bias), inverse)


def swiglu_ffn_vjp(
    dout: Rows, x: Rows, w1: Array, w3: Array, w2: Array, group_ends: Array, prob: Array, precision: Precision,
    after: Epilogues = PLAIN,
) -> Gradients:  # fmt: skip
    """dout (P, D) bfloat16 or its (q, sf) -> the gradients of x, the weights, prob and the biases."""
    mx = isinstance(x, tuple)
    rows, inverse, ends = _padding(group_ends, len(x[0]) if mx else len(x))
    hidden, dout = _forward(x, w1, w3, prob, rows, ends, precision, after), _permuted(dout, rows)
    dh, dw2 = _product_vjp(dout, hidden.h, w2, ends, precision)
    dh, (alpha, limit, offset) = round_to(dh, "bfloat16"), after.numbers
    dgate, dup, dprob = swiglu_bwd(dh, hidden.gate, hidden.up, hidden.prob, alpha, limit, offset)
    values = dequantize(dout[0], dout[1]) if isinstance(dout, tuple) else dout
    values = values.astype(np.float64)
    if len(prob) and after.b2 is not None:
        dot = np.where(hidden.group < 0, 0.0, (values * _of_rows(after.b2, hidden.group)).sum(-1))
        dprob = round_to(dprob.astype(np.float64) + dot, "float32")
    weighted = values * hidden.prob[:, None] if len(prob) else values
    db1, db3, db2 = (_group_sums(x, hidden.group, len(ends)) for x in (dgate, dup, weighted))
    dx_gate, dw1 = _product_vjp(dgate, hidden.x, w1, ends, precision)
    dx_up, dw3 = _product_vjp(dup, hidden.x, w3, ends, precision)
    dx = round_to(dx_gate + dx_up, "bfloat16" if mx else x.dtype.name)
    dw1, dw3, dw2 = (round_to(dw, w.dtype.name) for dw, w in ((dw1, w1), (dw3, w3), (dw2, w2)))
    return Gradients(permute_rows(dx, inverse), dw1, dw3, dw2, _permuted_vector(dprob, inverse), db1, db3, db2)
