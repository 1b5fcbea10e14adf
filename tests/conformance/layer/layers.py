"""Cases of more than one op or more than one process: feed-forwards, layers, the rows of four ranks.

RUNS                 name -> Recipe   each with its products named, since "auto" depends on the machine
FFN                  the experts' feed-forward, 8 of them
LAYERS, LAYER_RUNS   name -> Layer, and the pairs (name, name of a run) that are run
RANKED_RUNS          those on several ranks: (name, name of a run, number of ranks)
WIRE                 name -> Wire     rows of four ranks, and how many go where
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from mxep.core_kernels.cases import BF16, Array, lognormal_blocks, seeded
from mxep.core_kernels.policy.recipe import RECIPES, Recipe
from mxep.core_kernels.reference import choice, collectives, ffn
from mxep.core_kernels.reference import layer as layer_oracle

RUNS = {name: Recipe.parse(name, compute="exact") for name in RECIPES} | {
    f"{name}_folded": Recipe.parse(name, compute="fold") for name, recipe in RECIPES.items() if recipe.mx
}


def precision(run: str, sums: str) -> ffn.Precision:
    """How the operands of a run are quantized. sums: of FP8 products, "exact" or "sm_90"."""
    recipe = RUNS[run]
    return ffn.Precision(recipe.form("cpu"), recipe.wgrad_mx, recipe.rounding, sums)


# --- the experts' feed-forward ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # hashable: the references of a case are computed once
class FeedForward:
    """x and dout (P, D) bf16, fp32 weights w1, w3 (G, F, D), w2 (G, D, F), and b1, b3 (G, F), b2 (G, D) if there are
    biases, prob (P,) fp32. numbers: of SwiGLU."""

    x: Array
    dout: Array
    weights: dict[str, Array]
    group_ends: Array
    prob: Array
    numbers: dict[str, float] = field(default_factory=dict)

    def rows(self) -> Array:
        """(G, P) bool: the rows of each expert."""
        row, ends = np.arange(len(self.x)), self.group_ends[:, None]
        return (row < ends) & (row >= ends - np.diff(self.group_ends, prepend=0)[:, None])

    def reference(self, run: str, sums: str = "exact") -> dict[str, Array]:
        """The quantized definition: "out", and the gradients of x, of the weights, of prob and of the biases."""
        return _of_feed_forward(self, run, sums)


@cache
def _of_feed_forward(case: FeedForward, run: str, sums: str) -> dict[str, Array]:
    weights = (case.weights[name] for name in ("w1", "w3", "w2"))
    biases = {name: case.weights.get(name) for name in ("b1", "b3", "b2")}
    numbers = tuple(case.numbers.get(name, value) for name, value in ffn.NUMBERS.items())
    after = ffn.Epilogues(**biases, numbers=numbers)
    arguments = case.x, *weights, case.group_ends, case.prob, precision(run, sums), after
    grads = ffn.swiglu_ffn_vjp(case.dout, *arguments)
    results = dict(zip(("x", "w1", "w3", "w2", "prob", "b1", "b3", "b2"), grads, strict=True))
    given = {name: value for name, value in results.items() if biases.get(name, value) is not None}
    return {"out": ffn.swiglu_ffn(*arguments)} | given


def _feed_forward(name: str, sizes: list[int], rows: int, numbers: dict[str, float] | None = None) -> FeedForward:
    """With `numbers` of SwiGLU there are biases too."""
    rng, dim, hidden, ends = seeded(name), 64, 96, np.cumsum(sizes, dtype=np.int32)
    x, dout = (rng.standard_normal((rows, dim)) for _ in range(2))
    x[ends[-1] :], dout[ends[-1] :] = np.nan, np.inf
    shapes = {"w1": (len(sizes), hidden, dim), "w3": (len(sizes), hidden, dim), "w2": (len(sizes), dim, hidden)}
    weights = {key: (rng.standard_normal(shape) / 8).astype(np.float32) for key, shape in shapes.items()}
    prob = rng.random(rows).astype(np.float32)
    if numbers is not None:
        sides = {"b1": hidden, "b3": hidden, "b2": dim}
        weights |= {key: rng.standard_normal((len(sizes), n)).astype(np.float32) for key, n in sides.items()}
        prob[ends[-1] :] = np.nan
    return FeedForward(x.astype(BF16), dout.astype(BF16), weights, ends, prob, numbers or {})


FFN = _feed_forward("ffn", [20, 32, 0, 45, 300, 1, 64, 23], 500)
"""8 experts: the third has no rows, the fifth two spans of tokens. Rows past the last end hold NaN and infinity."""
FFN_WITH_BIASES = _feed_forward("ffn_with_biases", [20, 0, 45], 80, {"alpha": 1.702, "limit": 1.5, "offset": 1.0})
"""The numbers of GPT-OSS with a limit that one value in ten exceeds."""


# --- a whole layer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layer:
    """x and dy (T, D), fp32 parameters; T is a multiple of 4, so that 1, 2 and 4 ranks can share the tokens."""

    x: Array
    dy: Array
    params: dict[str, Array]
    top_k: int
    score: str
    normalize: bool
    prob_in: str = "combine"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a layer; `prob_in` makes no difference in fp64."""
        return {"top_k": self.top_k, "score": self.score, "normalize": self.normalize, "prob_in": self.prob_in}

    @property
    def choice(self) -> choice.Choice:
        return choice.Choice(self.top_k, self.score, self.normalize)

    @property
    def num_experts(self) -> int:
        return len(self.params["router"])

    def rows(self) -> Array:
        """(E, T) bool: the tokens that choose each expert."""
        ids, _ = choice.route(self.x.astype(np.float64) @ self.params["router"].T, self.choice)
        return (ids == np.arange(self.num_experts)[:, None, None]).any(-1)

    def unquantized(self) -> dict[str, Array]:
        """ "y" and the gradients in fp64 without any rounding."""
        return _unquantized(self)

    def reference(self, run: str, sums: str = "exact") -> dict[str, Array]:
        """The quantized definition: "y" and the gradients."""
        return _of_layer(self, run, sums)


@cache
def _unquantized(case: Layer) -> dict[str, Array]:
    arguments = case.x, layer_oracle.Parameters(**case.params), case.choice
    dx, grads = layer_oracle.moe_layer_vjp(case.dy, *arguments)
    named = {name: getattr(grads, name) for name in case.params}
    return {"y": layer_oracle.moe_layer(*arguments), "x": dx, **named}


@cache
def _of_layer(case: Layer, run: str, sums: str) -> dict[str, Array]:
    parameters = layer_oracle.Parameters(**case.params)
    options = layer_oracle.Options(case.choice, precision(run, sums), case.prob_in)
    dx, grads = layer_oracle.quantized_layer_vjp(case.dy, case.x, parameters, options)
    named = {name: getattr(grads, name) for name in case.params}
    return {"y": layer_oracle.quantized_layer(case.x, parameters, options), "x": dx, **named}


def _layer(
    name: str, tokens: int, bias: dict[int, float] | None = None, top_k: int = 2, score: str = "softmax",
    prob_in: str = "combine",
) -> Layer:  # fmt: skip
    """`bias` adds to an expert's logits, through a feature of x that is one."""
    rng, dim, hidden, num_experts = seeded(name), 64, 96, 8
    x = rng.standard_normal((tokens, dim))
    x[:, 0] = 1
    params = {
        "router": rng.standard_normal((num_experts, dim)) / 4,
        "w1": rng.standard_normal((num_experts, hidden, dim)) / 8,
        "w3": rng.standard_normal((num_experts, hidden, dim)) / 8,
        "w2": rng.standard_normal((num_experts, dim, hidden)) / 10,
    }
    for expert, value in (bias or {}).items():
        params["router"][expert, 0] = value
    single = {key: value.astype(np.float32) for key, value in params.items()}
    x, dy = x.astype(np.float32), rng.standard_normal(x.shape).astype(np.float32)
    return Layer(x, dy, single, top_k, score, top_k > 1, prob_in)


LAYERS = {
    "softmax": _layer("softmax", 96),
    "one_hot_expert": _layer("hot_expert", 96, bias={3: 15.0}),
    "empty_rank": _layer("empty_rank", 96, bias={4: -30.0, 5: -30.0, 6: -30.0, 7: -30.0}),  # 1 of 2 ranks, 2 of 4
    "one_token_per_rank": _layer("one_token_each", 4),
    "one_expert_per_token": _layer("top1", 96, top_k=1, score="sigmoid"),  # not normalized: it would always weigh one
    "sigmoid": _layer("sigmoid", 96, score="sigmoid"),
    "prob_in_swiglu": _layer("prob_in_swiglu", 96, bias={4: -30.0, 5: -30.0, 6: -30.0, 7: -30.0}, prob_in="swiglu"),
}
# Every recipe where the layers share their shapes, the default one for the rest: JAX compiles each in seconds.
LIKE_ANOTHER = "fp8_blockwise"
"""A run that differs from "fp8_rowwise" in its GEMMs alone."""
LAYER_RUNS = [
    (name, run)
    for name in LAYERS
    for run in RUNS
    if run == "mxfp8_wgrad_with_hp"
    or name == "softmax"
    or (name == "empty_rank" and run != LIKE_ANOTHER)
    or (name in ("one_hot_expert", "prob_in_swiglu") and run in RECIPES and run != LIKE_ANOTHER)
]

RANKS = 4
# Everything on 4 ranks. On 1 and 2: layers in the default recipe, and in bf16 where the probabilities stay with their
# token. How the products inside a rank are computed is no matter of its neighbours, and one rank has none: two layers,
# one with the probabilities among its rows.
RANKED_RUNS = [
    (name, run, degree)
    for name, run in LAYER_RUNS
    for degree in (1, 2, RANKS)
    if (degree > 1 or name in ("softmax", "prob_in_swiglu"))
    and (degree == RANKS or run == "mxfp8_wgrad_with_hp" or (run == "bf16" and LAYERS[name].prob_in == "combine"))
]


# --- four ranks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """rows[r] (M_r, K) bf16 of rank r, splits[r][s] of which go to rank s."""

    rows: tuple[Array, ...]
    splits: tuple[tuple[int, ...], ...]

    def received(self) -> list[Array]:
        return collectives.all_to_all(self.rows, self.splits)


def _wire(name: str, splits: tuple[tuple[int, ...], ...]) -> Wire:
    rng = seeded(name)
    return Wire(tuple(lognormal_blocks(rng, (sum(row), 96)).astype(BF16) for row in splits), splits)


def _spoiled(case: Wire) -> Wire:
    """The same with a NaN, an infinity and fp32-subnormal values in three of its rows."""
    rows = [part.copy() for part in case.rows]
    rows[0][0, 5], rows[0][1, 40], rows[1][0] = np.nan, -np.inf, rows[1][0] * BF16.type(2.0**-130)
    return Wire(tuple(rows), case.splits)


WIRE = {
    "uneven": _wire("uneven", ((3, 0, 5, 9), (1, 1, 1, 1), (0, 0, 40, 0), (7, 33, 2, 0))),
    "a_rank_sends_nothing": _wire("sends_nothing", ((2, 3, 4, 5), (0, 0, 0, 0), (1, 0, 2, 0), (0, 6, 0, 1))),
    "a_rank_receives_nothing": _wire("receives_nothing", ((2, 0, 4, 5), (8, 0, 1, 1), (1, 0, 2, 0), (0, 0, 0, 1))),
    "one_row": _wire("one_row", ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0), (0, 0, 0, 0))),
    "nan_inf_and_subnormals": _spoiled(_wire("spoiled", ((3, 0, 5, 9), (1, 1, 1, 1), (0, 0, 40, 0), (7, 33, 2, 0)))),
}
