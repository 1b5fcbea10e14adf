"""The inputs of the router's ops: ROUTES, name -> logits, the bias of the choice, and the options."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import BF16, Array, seeded


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
    name: str, tokens: int, experts: int, *, biased: bool = False, dtype: Any = np.float32, spread: float = 3,
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


_KINDS = {
    "softmax": {},
    "softmax_as_it_is": {"normalize": False, "route_scale": 2.5},
    "sigmoid": {"score_func": "sigmoid", "route_scale": 2.5},
    "sigmoid_as_it_is": {"score_func": "sigmoid", "normalize": False},
    "of_chosen": {"score_func": "softmax_of_chosen"},
}
_GROUPS = {"num_groups": 6, "top_k_groups": 3}
ROUTES = {
    **{name: _routed(name, 40, 16, top_k=4, **kind) for name, kind in _KINDS.items()},
    **{
        f"{name}_special": _special_logits(_routed(f"{name} special", 40, 16, biased=True, top_k=4, **kind))
        for name, kind in _KINDS.items()
    },
    "groups": _routed("groups", 37, 60, biased=True, top_k=8, score_func="sigmoid", **_GROUPS),
    "groups_by_max": _routed("max", 37, 60, top_k=8, group_score="max", **_GROUPS),
    "groups_special": _special_logits(_routed("groups special", 33, 60, top_k=8, score_func="sigmoid", **_GROUPS)),
    "bf16": _routed("bf16", 40, 16, top_k=4, dtype=BF16),
    "bf16_special": _special_logits(_routed("bf16 too", 40, 16, top_k=4, dtype=BF16, score_func="softmax_of_chosen")),
    "balanced": _routed("balanced", 33, 13, top_k=5, force_balance=True),
    "most_experts": _routed("most", 5, 512, top_k=32, score_func="sigmoid"),
    "every_expert": _routed("every", 17, 3, top_k=3, biased=True),
    "one_expert": _routed("one", 3, 1, top_k=1, score_func="sigmoid"),
    "no_tokens": _routed("none", 0, 8, top_k=2),
}
