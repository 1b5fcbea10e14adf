"""The choice of experts by definition, in fp64 and without rounding; core_kernels/router defines the bytes.

logits (T, E) --> scores --+ bias, groups--> ids (T, k) --> weights (T, k) = the scores of the chosen * route_scale
"""

from typing import NamedTuple

import numpy as np

from ..oracle_math import Array


class Choice(NamedTuple):
    """The options of a router, as the frontends' layers have them.

    score_func: "softmax", "sigmoid" or "softmax_of_chosen". normalize: divide the weights by their sum. bias: (E,),
    added to the scores for the choice alone, or (0,). The choice is among the top_k_groups best of num_groups groups; a
    group's score is the sum of its two best ("top2") or its best ("max").
    """

    top_k: int
    score_func: str = "softmax"
    normalize: bool = True
    route_scale: float = 1.0
    bias: Array = np.zeros(0)
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: str = "top2"


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def scores(logits: Array, score_func: str) -> Array:
    """logits (T, E) -> scores (T, E): softmax over the experts, or each expert's own sigmoid."""
    return sigmoid(logits) if score_func == "sigmoid" else softmax(logits)


def _best(values: Array, k: int) -> Array:
    """The indices of the k largest values, largest first; a tie goes to the lower one."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k]


def _candidates(choice_TE: Array, choice: Choice) -> Array:
    """The values, -inf outside of the best groups."""
    if choice.num_groups == 1:
        return choice_TE
    grouped = choice_TE.reshape(len(choice_TE), choice.num_groups, -1)
    ranked = -np.sort(-grouped, axis=-1)
    group_scores = ranked[..., 0] if choice.group_score == "max" else ranked[..., :2].sum(-1)
    kept = np.zeros(group_scores.shape, bool)
    np.put_along_axis(kept, _best(group_scores, choice.top_k_groups), True, -1)
    return np.where(kept[..., None], grouped, -np.inf).reshape(choice_TE.shape)


def route(logits: Array, choice: Choice) -> tuple[Array, Array]:
    """logits (T, E) -> expert ids (T, k) and their weights (T, k)."""
    logits = logits.astype(np.float64)
    values = logits if choice.score_func == "softmax_of_chosen" else scores(logits, choice.score_func)
    ids = _best(_candidates(values + choice.bias if len(choice.bias) else values, choice), choice.top_k)
    chosen = np.take_along_axis(values, ids, -1)
    if choice.score_func == "softmax_of_chosen":
        chosen = softmax(chosen)
    elif choice.normalize:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    return ids, chosen * choice.route_scale


def route_vjp(dweights: Array, dshares: Array, logits: Array, choice: Choice) -> Array:
    """dweights (T, k), and dshares (E,) of the sums over tokens of scores / sum of scores -> dlogits (T, E)."""
    logits = logits.astype(np.float64)
    s, (ids, weights) = scores(logits, choice.score_func), route(logits, choice)
    dweights, weights = dweights * choice.route_scale, weights / choice.route_scale
    total = s.sum(-1, keepdims=True)
    ds = (dshares - (dshares * s / total).sum(-1, keepdims=True)) / total
    dlogits = np.zeros_like(s)
    if choice.normalize:
        dweights = dweights - (dweights * weights).sum(-1, keepdims=True)
    if choice.score_func == "softmax_of_chosen":
        np.put_along_axis(dlogits, ids, dweights * weights, -1)
    else:
        if choice.normalize:
            dweights = dweights / np.take_along_axis(s, ids, -1).sum(-1, keepdims=True)
        chosen = np.zeros_like(s)
        np.put_along_axis(chosen, ids, dweights, -1)
        ds = ds + chosen
    return dlogits + (
        ds * s * (1 - s) if choice.score_func == "sigmoid" else s * (ds - (ds * s).sum(-1, keepdims=True))
    )
