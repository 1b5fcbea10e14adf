"""Cases of the family `router`."""

from functools import partial

import numpy as np

from ..cases import BF16, F32, Arrays, Case, K, Rng, floats

NONE = np.zeros(0, F32)


def logits(rng: Rng, m: int) -> Arrays:
    return floats(rng, m, 40, dtype=F32), rng.standard_normal(40, F32)


def gradients(rng: Rng, m: int, dtype: np.dtype = F32) -> Arrays:
    logits = floats(rng, m, 40, dtype=dtype)
    ids = rng.random((m, 40), F32).argsort(kind="stable")[:, :5].astype(np.int32)
    return rng.standard_normal((m, 5), F32), rng.standard_normal(40, F32), logits, ids


def gradients_bf16(rng: Rng, m: int) -> Arrays:
    dweights, _, *others = gradients(rng, m, BF16)
    return dweights, NONE, *others


def logits_bwd(rng: Rng, m: int, experts: int, adds: bool = True) -> Arrays:
    dlogits, weight, dx = floats(rng, m, 2 * experts), floats(rng, experts, K), floats(rng, m, K)
    return dlogits, weight, dx if adds else dx[:0, 0]


_GROUPS = {"num_groups": 5, "top_k_groups": 2}
_BY_MAX = {"normalize": False, "num_groups": 8, "top_k_groups": 3, "group_score": "max"}
CASES = {
    "route": Case("route", logits, {"top_k": 5, "route_scale": 2.5}),
    "route_bf16": Case(
        "route", lambda rng, m: (floats(rng, m, 24), NONE), {"top_k": 3, "score_func": "softmax_of_chosen"}
    ),
    "route_in_groups": Case("route", logits, {"top_k": 6, "score_func": "sigmoid", **_GROUPS}),
    "route_in_groups_by_max": Case("route", logits, {"top_k": 6, **_BY_MAX}),
    "route_balanced": Case("route", logits, {"top_k": 5, "score_func": "sigmoid", "force_balance": True}),
    "route_bwd": Case("route_bwd", gradients, {"score_func": "sigmoid", "route_scale": 2.5}),
    "route_bwd_bf16": Case("route_bwd", gradients_bf16),
    "route_bwd_of_chosen": Case("route_bwd", gradients, {"score_func": "softmax_of_chosen"}),
    "route_bwd_in_two_terms": Case("route_bwd", gradients, {"split": True}),
    "logits_bwd": Case("logits_bwd", partial(logits_bwd, experts=40)),
    "logits_bwd_alone": Case("logits_bwd", partial(logits_bwd, experts=6, adds=False)),
    "logits_bwd_of_many": Case("logits_bwd", partial(logits_bwd, experts=300)),
}
