"""A Mixture-of-Experts layer on one device by definition: without quantization in fp64, and quantized.

x --router--> scores --top k, normalised--> weights w
y = sum over the k experts of  w * (silu(x w1^T) * (x w3^T)) w2^T

`moe_layer` and `moe_layer_vjp` compute in fp64 and round nothing. `quantized_layer` and `quantized_layer_vjp` quantize
the operands that a recipe quantizes and round these values:

value                               is rounded to
weights w, their gradients          float32
a row of x                          bfloat16, then quantized if the recipe is MXFP8
an expert's output                  bfloat16
the gradient of an expert's output  bfloat16, then quantized if the recipe is MXFP8
dx of a row, dx of its token        bfloat16, before the gradient through the router is added
y, dx                               the dtype of x
drouter                             the dtype of router
values inside an expert             as ffn.py says

The router computes in fp64. The frontends compute it in fp32 and choose the same experts, unless two scores agree to
about 24 bits.
"""

from typing import NamedTuple

import numpy as np

from ..combine.oracle import combine, combine_bwd
from ..oracle_math import Array, round_to
from ..permute.oracle import permute_rows
from ..quantize.oracle import quantize_row
from ..routing.oracle import sort_by_expert
from .ffn import Precision, Rows, swiglu_ffn, swiglu_ffn_vjp


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def scores(logits: Array, score: str) -> Array:
    """logits (T, E) -> scores (T, E): softmax over the experts, or each expert's own sigmoid."""
    if score == "sigmoid":
        return sigmoid(logits)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def route(logits: Array, top_k: int, score: str = "softmax", normalize: bool = True) -> tuple[Array, Array]:
    """logits (T, E) -> expert ids (T, k) and their scores (T, k), divided by their sum if `normalize`.

    A tie goes to the lower expert.
    """
    s = scores(logits.astype(np.float64), score)
    ids = np.argsort(-s, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(s, ids, -1)
    return ids, weights / weights.sum(-1, keepdims=True) if normalize else weights


def route_vjp(dweights: Array, logits: Array, top_k: int, score: str = "softmax", normalize: bool = True) -> Array:
    """dweights (T, k) -> dlogits (T, E)."""
    s = scores(logits.astype(np.float64), score)
    ids, weights = route(logits, top_k, score, normalize)
    if normalize:
        total = np.take_along_axis(s, ids, -1).sum(-1, keepdims=True)
        dweights = (dweights - (dweights * weights).sum(-1, keepdims=True)) / total
    ds = np.zeros_like(s)
    np.put_along_axis(ds, ids, dweights, -1)
    return ds * s * (1 - s) if score == "sigmoid" else s * (ds - (ds * s).sum(-1, keepdims=True))


def swiglu_expert(x: Array, w1: Array, w3: Array, w2: Array) -> Array:
    """x (T, D), w1 and w3 (H, D), w2 (D, H) -> (silu(x w1^T) * (x w3^T)) w2^T."""
    gate = x @ w1.T
    return (gate * sigmoid(gate) * (x @ w3.T)) @ w2.T


def swiglu_expert_vjp(dout: Array, x: Array, w1: Array, w3: Array, w2: Array) -> tuple[Array, Array, Array, Array]:
    """dout (T, D) -> dx, dw1, dw3, dw2."""
    gate, up = x @ w1.T, x @ w3.T
    s = sigmoid(gate)
    dhidden = dout @ w2
    dgate, dup = dhidden * up * s * (1 + gate * (1 - s)), dhidden * gate * s
    return dgate @ w1 + dup @ w3, dgate.T @ x, dup.T @ x, dout.T @ (gate * s * up)


def moe_layer(
    x: Array, router: Array, w1: Array, w3: Array, w2: Array, top_k: int, score: str = "softmax", normalize: bool = True
) -> Array:
    """x (T, D), router (E, D), w1 and w3 (E, H, D), w2 (E, D, H) -> y (T, D), all in fp64."""
    x, router, w1, w3, w2 = (v.astype(np.float64) for v in (x, router, w1, w3, w2))
    ids, weights = route(x @ router.T, top_k, score, normalize)
    y = np.zeros_like(x)
    for e in range(len(router)):
        token, slot = np.nonzero(ids == e)
        y[token] += weights[token, slot, None] * swiglu_expert(x[token], w1[e], w3[e], w2[e])
    return y


def moe_layer_vjp(
    dy: Array,
    x: Array,
    router: Array,
    w1: Array,
    w3: Array,
    w2: Array,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
) -> tuple[Array, Array, Array, Array, Array]:
    """dy (T, D) -> dx, drouter, dw1, dw3, dw2, all in fp64."""
    dy, x, router, w1, w3, w2 = (v.astype(np.float64) for v in (dy, x, router, w1, w3, w2))
    logits = x @ router.T
    ids, weights = route(logits, top_k, score, normalize)
    dx, dweights = np.zeros_like(x), np.zeros_like(weights)
    dw1, dw3, dw2 = np.zeros_like(w1), np.zeros_like(w3), np.zeros_like(w2)
    for e in range(len(router)):
        token, slot = np.nonzero(ids == e)
        expert = (x[token], w1[e], w3[e], w2[e])
        dweights[token, slot] = (dy[token] * swiglu_expert(*expert)).sum(-1)
        dtoken, dw1[e], dw3[e], dw2[e] = swiglu_expert_vjp(weights[token, slot, None] * dy[token], *expert)
        dx[token] += dtoken
    dlogits = route_vjp(dweights, logits, top_k, score, normalize)
    return dx + dlogits @ router, dlogits.T @ x, dw1, dw3, dw2


# --- quantized ------------------------------------------------------------------------------------


class Parameters(NamedTuple):
    """router (E, D), w1 and w3 (E, F, D), w2 (E, D, F), float32 or bfloat16; or their gradients."""

    router: Array
    w1: Array
    w3: Array
    w2: Array


class Options(NamedTuple):
    """top_k, score, normalize: as in `moe_layer`. prob_in: "combine", where a weight multiplies the expert's output, or
    "swiglu", where it multiplies the hidden values."""

    top_k: int
    precision: Precision
    score: str = "softmax"
    normalize: bool = True
    prob_in: str = "combine"

    @property
    def mx(self) -> bool:
        """Whether rows and their gradients travel as MXFP8."""
        return self.precision.form in ("mx", "fold")


class _Rows(NamedTuple):
    """T k rows, sorted by expert, and where they belong.

    x: as the experts take them. order (T k,): token * k + slot of each row. slots (T, k): the row of each slot.
    group_ends (E,). prob (T k,) float32: the weights in SwiGLU. probs (T, k) float32: the weights in the combine. The
    one that is not used is (0,).
    """

    x: Rows
    order: Array
    slots: Array
    group_ends: Array
    prob: Array
    probs: Array


def _as_sent(rows: Array, options: Options) -> Rows:
    """Rows (R, D) bfloat16 as an expert takes them."""
    return quantize_row(rows, options.precision.rounding) if options.mx else rows


def _rows(x: Array, router: Array, options: Options) -> _Rows:
    logits = x.astype(np.float64) @ router.astype(np.float64).T
    ids, weights = route(logits, options.top_k, options.score, options.normalize)
    order, inverse, counts = sort_by_expert(ids.reshape(-1), len(router))
    rows = permute_rows(round_to(x.astype(np.float64), "bfloat16"), order // options.top_k)
    weights, none = weights.astype(np.float32), np.zeros(0, np.float32)
    prob, probs = (weights.reshape(-1)[order], none) if options.prob_in == "swiglu" else (none, weights)
    return _Rows(_as_sent(rows, options), order, inverse.reshape(ids.shape), np.cumsum(counts), prob, probs)


def quantized_layer(x: Array, parameters: Parameters, options: Options) -> Array:
    """x (T, D) float32 or bfloat16 -> y (T, D) in the dtype of x."""
    rows = _rows(x, parameters.router, options)
    out = swiglu_ffn(rows.x, *parameters[1:], rows.group_ends, rows.prob, options.precision)
    return combine(out, rows.slots, rows.probs, x.dtype.name)


def quantized_layer_vjp(dy: Array, x: Array, parameters: Parameters, options: Options) -> tuple[Array, Parameters]:
    """dy (T, D) in the dtype of x -> dx, and the gradients of the parameters in their dtypes."""
    rows = _rows(x, parameters.router, options)
    expert = rows.x, *parameters[1:], rows.group_ends, rows.prob, options.precision
    dout, dprobs = combine_bwd(dy, swiglu_ffn(*expert), rows.slots, rows.order, rows.probs)
    grads = swiglu_ffn_vjp(_as_sent(dout, options), *expert)
    dweights = dprobs if options.prob_in == "combine" else grads.dprob[rows.slots]
    dx = combine(round_to(grads.dx.astype(np.float64), "bfloat16"), rows.slots, np.zeros(0, np.float32))

    x64, router = x.astype(np.float64), parameters.router.astype(np.float64)
    routing = options.top_k, options.score, options.normalize
    dlogits = route_vjp(dweights.astype(np.float64), x64 @ router.T, *routing)
    drouter = round_to(dlogits.T @ x64, parameters.router.dtype.name)
    dx = round_to(dx.astype(np.float64) + dlogits @ router, x.dtype.name)
    return dx, Parameters(drouter, *grads[1:4])
