"""A Mixture-of-Experts layer on one device, in fp64 and without quantization, and its gradient.

x --router--> scores --top k, normalised--> weights w
y = sum over the k experts of  w * (silu(x w1^T) * (x w3^T)) w2^T
"""

import numpy as np

Array = np.ndarray


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
