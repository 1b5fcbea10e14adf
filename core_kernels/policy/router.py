"""How a layer chooses the experts of a token, and its shared expert: two frozen dataclasses for both frontends.

A field is checked once, here. `check_router` then needs the number of experts alone.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from ..formats import BLOCK
from ..launch import fail
from ..router.plan import check_choice, find_misfit
from .prob_in import ProbIn, check_prob_in

ScoreFunc = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["top2", "max"]


class RouteOptions(TypedDict):
    """The options of the op `route`, as in `RouterConfig`.

    Attributes:
        top_k: Experts per token.
        score_func: The function from logits to scores.
        normalize: Whether the weights of a token are divided by their sum.
        route_scale: The factor of the weights.
        num_groups: Groups of neighbouring experts.
        top_k_groups: Groups among which a token chooses.
        group_score: The score of a group.
        force_balance: Whether all experts get equally many tokens.
    """

    top_k: int
    score_func: ScoreFunc
    normalize: bool
    route_scale: float
    num_groups: int
    top_k_groups: int
    group_score: GroupScore
    force_balance: bool


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The choice of experts and their weights. It is hashable, and a static value in JAX.

    Args:
        top_k: Experts per token, 1 to 32.
        score_func: "softmax" over all experts, or "sigmoid" of each. "softmax_of_chosen" chooses by logits, and the
            weights are the softmax over the chosen experts.
        normalize: Divide the weights of a token by their sum.
        route_scale: The factor of the weights.
        num_groups: Groups of neighbouring experts, a divisor of the number of experts.
        top_k_groups: The choice is among the experts of the best `top_k_groups` groups.
        group_score: The score of a group: the sum of its two best scores ("top2"), or its best score ("max").
        force_balance: Token t takes the experts t * top_k, t * top_k + 1, ... modulo E, for benchmarks.
        bias: The router's linear layer has a bias, which is learned.
        selection_bias: The choice adds a value per expert to the scores, which `update_selection_bias` updates. In
            PyTorch the layer has a buffer `selection_bias` (E,) float32. In JAX `moe.apply` requires the array.
        prob_in: The place where a row is multiplied by its weight. "swiglu": inside the experts, before h is rounded.
            The combine then saves no rows for its gradient and sends quantized tokens backward. "combine": the fp32
            sum of the experts' outputs. It is faster with b2, which the experts otherwise add in a pass of its own.
            "input": the experts' input, as Llama 4 does. x then has a row per token and expert.

    Raises:
        ValueError: For values that are not allowed.
        TypeError: For values of another type.

    Example:
        >>> RouterConfig(8, score_func="sigmoid", num_groups=8, top_k_groups=4, selection_bias=True).route_scale
        1.0
    """

    top_k: int
    score_func: ScoreFunc = "softmax"
    normalize: bool = True
    route_scale: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    group_score: GroupScore = "top2"
    force_balance: bool = False
    bias: bool = False
    selection_bias: bool = False
    prob_in: ProbIn = "swiglu"

    def __post_init__(self) -> None:
        for name in ("top_k", "num_groups", "top_k_groups"):
            _require_type("RouterConfig", name, getattr(self, name), int)
        for name in ("normalize", "force_balance", "bias", "selection_bias"):
            _require_type("RouterConfig", name, getattr(self, name), bool)
        check_choice("RouterConfig", **self.options)
        check_prob_in("RouterConfig", self.prob_in)

    @property
    def options(self) -> RouteOptions:
        """The options of the op `route`."""
        return RouteOptions(
            top_k=self.top_k,
            score_func=self.score_func,
            normalize=self.normalize,
            route_scale=self.route_scale,
            num_groups=self.num_groups,
            top_k_groups=self.top_k_groups,
            group_score=self.group_score,
            force_balance=self.force_balance,
        )


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that takes every token and is added to the sum of the chosen experts. It has no biases.

    Args:
        hidden_dim: A positive multiple of 32.
        gate: Multiply its output by the sigmoid of a learned product with x, as Qwen2-MoE does.

    Raises:
        ValueError: For another hidden_dim.
        TypeError: For values of another type.

    Example:
        >>> SharedExpert(64, gate=True)
        SharedExpert(hidden_dim=64, gate=True)
    """

    hidden_dim: int
    gate: bool = False

    def __post_init__(self) -> None:
        _require_type("SharedExpert", "hidden_dim", self.hidden_dim, int)
        if not 1 <= self.hidden_dim < 2**31 or self.hidden_dim % BLOCK:
            allowed = f"allowed: positive multiples of {BLOCK} below 2^31"
            fail(ValueError, "SharedExpert", "hidden_dim", self.hidden_dim, allowed)
        _require_type("SharedExpert", "gate", self.gate, bool)


def check_router(op: str, router: object, num_experts: int) -> RouterConfig:
    """Check the argument `router` of a function.

    Args:
        op: The function that an error names.
        router: The argument.
        num_experts: The number of experts among which it chooses.

    Returns:
        `router`.

    Raises:
        TypeError: For another type.
        ValueError: For a config that does not fit the number of experts.

    Example:
        >>> check_router("MoE", RouterConfig(2), 8).top_k
        2
    """
    if not isinstance(router, RouterConfig):
        example = f"RouterConfig(top_k={router})" if type(router) is int else "RouterConfig(top_k=2)"
        fail(TypeError, op, "router", repr(router), f"allowed: a RouterConfig, such as {example}")
    if misfit := find_misfit(num_experts, router.top_k, router.num_groups, router.top_k_groups, router.group_score):
        field, value, allowed = misfit
        fail(ValueError, op, "router", f"{field}={value}", allowed)
    return router


def check_shared(op: str, shared: object) -> SharedExpert | None:
    """Check the argument `shared` of a layer.

    Args:
        op: The function that an error names.
        shared: The argument.

    Returns:
        `shared`.

    Raises:
        TypeError: Unless it is a SharedExpert or None.

    Example:
        >>> check_shared("MoE", SharedExpert(32))
        SharedExpert(hidden_dim=32, gate=False)
    """
    if shared is not None and not isinstance(shared, SharedExpert):
        fail(TypeError, op, "shared", repr(shared), "allowed: a SharedExpert, or None for no shared expert")
    return shared


def _require_type(op: str, field: str, value: Any, kind: type) -> None:
    if type(value) is not kind:
        fail(TypeError, op, field, repr(value), f"allowed: {'an' if kind is int else 'a'} {kind.__name__}")
