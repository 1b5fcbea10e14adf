"""A Mixture-of-Experts layer on one device by definition: without quantization in fp64, and quantized.

x --router--> logits --choice.py--> experts, weights w
y = sum over the k experts of  w * (silu(x w1^T) * (x w3^T)) w2^T,  plus the shared expert of x

`moe_layer` and `moe_layer_vjp` compute in fp64 and round nothing. `quantized_layer` and `quantized_layer_vjp` quantize
the operands that a recipe quantizes and round these values:

value                               is rounded to
weights w, their gradients          float32
a row of x                          bfloat16, then quantized if the recipe is MXFP8
an expert's output                  bfloat16
the gradient of an expert's output  bfloat16, then quantized if the recipe is MXFP8
dx of a row, dx of its token        bfloat16, before the gradient through the router is added
y, dx, the shared expert's parts    the dtype of x, then their sum
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
from .choice import Choice, route, route_vjp, sigmoid
from .ffn import Precision, Rows, swiglu_ffn, swiglu_ffn_vjp


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


class Parameters(NamedTuple):
    """router (E, D), w1 and w3 (E, F, D), w2 (E, D, F), float32 or bfloat16; or their gradients.

    shared: w1, w3 (1, S, D) and w2 (1, D, S) of the shared expert, or nothing.
    """

    router: Array
    w1: Array
    w3: Array
    w2: Array
    shared: tuple[Array, ...] = ()

    @property
    def experts(self) -> tuple[Array, Array, Array]:
        return self.w1, self.w3, self.w2


def _fp64(parameters: Parameters) -> Parameters:
    router, w1, w3, w2 = (w.astype(np.float64) for w in parameters[:4])
    return Parameters(router, w1, w3, w2, tuple(w.astype(np.float64) for w in parameters.shared))


def moe_layer(x: Array, parameters: Parameters, choice: Choice) -> Array:
    """x (T, D) -> y (T, D), all in fp64."""
    x, (router, w1, w3, w2, shared) = x.astype(np.float64), _fp64(parameters)
    ids, weights = route(x @ router.T, choice)
    y = np.zeros_like(x)
    if shared:
        shared_w1, shared_w3, shared_w2 = (w[0] for w in shared)
        y = swiglu_expert(x, shared_w1, shared_w3, shared_w2)
    for e in range(len(router)):
        token, slot = np.nonzero(ids == e)
        y[token] += weights[token, slot, None] * swiglu_expert(x[token], w1[e], w3[e], w2[e])
    return y


def moe_layer_vjp(dy: Array, x: Array, parameters: Parameters, choice: Choice) -> tuple[Array, Parameters]:
    """dy (T, D) -> dx and the gradients of the parameters, all in fp64."""
    dy, x = dy.astype(np.float64), x.astype(np.float64)
    router, w1, w3, w2, shared = _fp64(parameters)
    logits = x @ router.T
    ids, weights = route(logits, choice)
    dx, dweights = np.zeros_like(x), np.zeros_like(weights)
    dw1, dw3, dw2 = np.zeros_like(w1), np.zeros_like(w3), np.zeros_like(w2)
    for e in range(len(router)):
        token, slot = np.nonzero(ids == e)
        dweights[token, slot] = (dy[token] * swiglu_expert(x[token], w1[e], w3[e], w2[e])).sum(-1)
        dout = weights[token, slot, None] * dy[token]
        dtoken, dw1[e], dw3[e], dw2[e] = swiglu_expert_vjp(dout, x[token], w1[e], w3[e], w2[e])
        dx[token] += dtoken
    dlogits = route_vjp(dweights, np.zeros(len(router)), logits, choice)
    dx += dlogits @ router
    dshared: tuple[Array, ...] = ()
    if shared:
        shared_w1, shared_w3, shared_w2 = (w[0] for w in shared)
        of_x, *of_weights = swiglu_expert_vjp(dy, x, shared_w1, shared_w3, shared_w2)
        dx, dshared = dx + of_x, tuple(d[None] for d in of_weights)
    return dx, Parameters(dlogits.T @ x, dw1, dw3, dw2, dshared)


# --- quantized ------------------------------------------------------------------------------------


class Options(NamedTuple):
    """prob_in: "combine", where a weight multiplies the expert's output, or "swiglu", where it multiplies the hidden
    values."""

    choice: Choice
    precision: Precision
    prob_in: str = "swiglu"

    @property
    def mx(self) -> bool:
        """Whether rows and their gradients are sent in MXFP8."""
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
    ids, weights = route(logits, options.choice)
    order, inverse, counts = sort_by_expert(ids.reshape(-1), len(router))
    rows = permute_rows(round_to(x.astype(np.float64), "bfloat16"), order // options.choice.top_k)
    weights, none = weights.astype(np.float32), np.zeros(0, np.float32)
    prob, probs = (weights.reshape(-1)[order], none) if options.prob_in == "swiglu" else (none, weights)
    return _Rows(_as_sent(rows, options), order, inverse.reshape(ids.shape), np.cumsum(counts), prob, probs)


class _Experts(NamedTuple):
    """The arguments of `swiglu_ffn`."""

    x: Rows
    w1: Array
    w3: Array
    w2: Array
    group_ends: Array
    prob: Array
    precision: Precision


def _routed_experts(rows: _Rows, parameters: Parameters, options: Options) -> _Experts:
    w1, w3, w2 = parameters.experts
    return _Experts(rows.x, w1, w3, w2, rows.group_ends, rows.prob, options.precision)


def _shared_expert(x: Array, parameters: Parameters, options: Options) -> _Experts:
    """The shared expert, which takes every token."""
    rows, (w1, w3, w2) = _as_sent(round_to(x.astype(np.float64), "bfloat16"), options), parameters.shared
    return _Experts(rows, w1, w3, w2, np.array([len(x)], np.int32), np.zeros(0, np.float32), options.precision)


def _plus(a: Array, b: Array) -> Array:
    """a + b in a's dtype, b rounded to it first."""
    return round_to(a.astype(np.float64) + round_to(b.astype(np.float64), a.dtype.name), a.dtype.name)


def quantized_layer(x: Array, parameters: Parameters, options: Options) -> Array:
    """x (T, D) float32 or bfloat16 -> y (T, D) in the dtype of x."""
    rows = _rows(x, parameters.router, options)
    out = swiglu_ffn(*_routed_experts(rows, parameters, options))
    y = combine(out, rows.slots, rows.probs, x.dtype.name)
    if parameters.shared:
        y = _plus(y, swiglu_ffn(*_shared_expert(x, parameters, options)))
    return y


def quantized_layer_vjp(dy: Array, x: Array, parameters: Parameters, options: Options) -> tuple[Array, Parameters]:
    """dy (T, D) in the dtype of x -> dx, and the gradients of the parameters in their dtypes."""
    rows = _rows(x, parameters.router, options)
    experts = _routed_experts(rows, parameters, options)
    dout, dprobs = combine_bwd(dy, swiglu_ffn(*experts), rows.slots, rows.order, rows.probs)
    grads = swiglu_ffn_vjp(_as_sent(dout, options), *experts)
    dweights = dprobs if options.prob_in == "combine" else grads.dprob[rows.slots]
    dx = combine(round_to(grads.dx.astype(np.float64), "bfloat16"), rows.slots, np.zeros(0, np.float32))

    x64, router = x.astype(np.float64), parameters.router.astype(np.float64)
    dlogits = route_vjp(dweights.astype(np.float64), np.zeros(len(router)), x64 @ router.T, options.choice)
    drouter = round_to(dlogits.T @ x64, parameters.router.dtype.name)
    dx = round_to(dx.astype(np.float64) + dlogits @ router, x.dtype.name)
    dshared: tuple[Array, ...] = ()
    if parameters.shared:
        dout = round_to(dy.astype(np.float64), "bfloat16")
        of_shared = swiglu_ffn_vjp(dout, *_shared_expert(x, parameters, options))
        dx, dshared = _plus(dx, of_shared.dx), (of_shared.dw1, of_shared.dw3, of_shared.dw2)
    return dx, Parameters(drouter, grads.dw1, grads.dw3, grads.dw2, dshared)
