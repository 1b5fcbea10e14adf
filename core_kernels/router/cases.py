"""Cases of the family `router`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..cases import BF16, F32, Array, Arrays, Case, K, Rng, fixed, floats, seeded, timed
from .oracle import route

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
TIMED = (
    timed("route", "M top_k experts", options="top_k", direction="fwd"),
    timed("route_bwd", "M top_k experts", direction="bwd"),
)


# --- fixed values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routed:
    """logits (T, E) fp32 or bf16, bias (E,) fp32 or (0,)."""

    logits: Array
    bias: Array
    options: dict[str, Any]

    @property
    def score_options(self) -> dict[str, Any]:
        """The options that the gradient has too."""
        return {name: self.options[name] for name in ("score_func", "normalize", "route_scale") if name in self.options}


def _routed(
    name: str, tokens: int, experts: int, *, biased: bool = False, dtype: Any = F32, spread: float = 3,
    **options: Any,
) -> Routed:  # fmt: skip
    rng = seeded(name)
    bias = rng.standard_normal(experts) * 0.3 if biased else np.zeros(0)
    logits = spread * rng.standard_normal((tokens, experts))
    return Routed(logits.astype(dtype), bias.astype(np.float32), options)


def _special_logits(case: Routed) -> Routed:
    """Rows of NaN, infinities, zeros of both signs, equal values, and scores that underflow."""
    x = case.logits.copy()
    x[1, 2], x[2], x[3, 1], x[4], x[5, 0] = np.nan, np.nan, np.inf, -np.inf, -np.inf
    x[6], x[7, ::2], x[7, 1::2], x[8], x[9], x[10] = 1.5, -0.0, 0.0, -200, 200, np.ldexp(x[10], 120)
    x[11], x[12, 3:], x[13, ::3] = x[11] / 5 - 88, -150, x[13, 0]
    return Routed(x, case.bias, case.options)


_KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax_as_it_is": {"normalize": False, "route_scale": 2.5},
    "sigmoid": {"score_func": "sigmoid", "route_scale": 2.5},
    "sigmoid_as_it_is": {"score_func": "sigmoid", "normalize": False},
    "of_chosen": {"score_func": "softmax_of_chosen"},
}
_IN_GROUPS: dict[str, Any] = {"num_groups": 6, "top_k_groups": 3}
ROUTES = {
    **{name: _routed(name, 40, 16, top_k=4, **kind) for name, kind in _KINDS.items()},
    **{
        f"{name}_special": _special_logits(_routed(f"{name} special", 40, 16, biased=True, top_k=4, **kind))
        for name, kind in _KINDS.items()
    },
    "groups": _routed("groups", 37, 60, biased=True, top_k=8, score_func="sigmoid", **_IN_GROUPS),
    "groups_by_max": _routed("max", 37, 60, top_k=8, group_score="max", **_IN_GROUPS),
    "groups_special": _special_logits(_routed("groups special", 33, 60, top_k=8, score_func="sigmoid", **_IN_GROUPS)),
    "bf16": _routed("bf16", 40, 16, top_k=4, dtype=BF16),
    "bf16_special": _special_logits(_routed("bf16 too", 40, 16, top_k=4, dtype=BF16, score_func="softmax_of_chosen")),
    "balanced": _routed("balanced", 33, 13, top_k=5, force_balance=True),
    "most_experts": _routed("most", 5, 512, top_k=32, score_func="sigmoid"),
    "every_expert": _routed("every", 17, 3, top_k=3, biased=True),
    "one_expert": _routed("one", 3, 1, top_k=1, score_func="sigmoid"),
    "no_tokens": _routed("none", 0, 8, top_k=2),
}


def routed_gradients(name: str, shared: bool) -> Arrays:
    """Inputs of route_bwd."""
    case, rng = ROUTES[name], seeded(f"gradient {name}")
    ids, *_ = route(case.logits, case.bias, **case.options)
    dweights, dshares = rng.standard_normal(ids.shape), rng.standard_normal(case.logits.shape[1] if shared else 0)
    return dweights.astype(F32), dshares.astype(F32), case.logits, ids


CONFORMANCE = {
    **{f"route-{name}": fixed("route", case.logits, case.bias, **case.options) for name, case in ROUTES.items()},
    **{
        f"route_bwd-{name}{'-shares' * shared}": Case(
            "route_bwd", lambda *_, of=(name, shared): routed_gradients(*of), case.score_options
        )
        for name, case in ROUTES.items()
        for shared in (False, True)
    },
}
