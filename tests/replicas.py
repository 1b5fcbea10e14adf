"""Tokens of several ranks, their experts, and the results of a pipeline that sums replicas on the experts' ranks.

An expert multiplies its rows by a number of its own: E numbers, no products, so that all bytes follow from the oracles.
Both frontends run the same cases.
"""

from typing import Any, NamedTuple

import numpy as np
from mxep.core_kernels.combine.oracle import combine_bwd
from mxep.core_kernels.oracle_math import Array, round_to
from mxep.core_kernels.policy.recipe import RECIPES, Recipe, TransferName
from mxep.core_kernels.reference.replicas import UNWEIGHTED, as_sent, sum_by_rank

D, TOP_K, LOCAL = 64, 4, 3
TRANSFERS: tuple[TransferName, ...] = ("dispatch", "dispatch_grad", "combine", "combine_grad")
RUNS = {
    "bf16": RECIPES["bf16"],
    "mxfp8": RECIPES["mxfp8"],
    "four MXFP8 all-to-alls": Recipe.parse("mxfp8", mxfp8_all_to_all=TRANSFERS),
    "four bf16 all-to-alls": Recipe.parse("mxfp8", mxfp8_all_to_all=()),
}
ROUTINGS = ("one expert", "empty ranks", "no tokens", "one rank", "empty experts", "twice", "random")


class Case(NamedTuple):
    """Of one rank: x, dy (T, D) bfloat16, experts (T, TOP_K) int32, probs (T, TOP_K) float32; factors (E,) float32, of
    all ranks."""

    x: Array
    dy: Array
    experts: Array
    probs: Array
    factors: Array


def case(routing: str, rank: int, ranks: int, tokens: int | None = None) -> Case:
    """tokens: None is a number that differs between ranks. Of "twice" tokens have an expert more than once."""
    rng, e = np.random.default_rng([ROUTINGS.index(routing), rank]), LOCAL * ranks
    tokens = int(rng.integers(1, 24)) if tokens is None else tokens
    if routing == "no tokens" or (routing == "empty ranks" and rank % 2):
        tokens = 0
    allowed = {
        "one rank": np.arange(e - LOCAL, e).repeat(TOP_K),
        "empty experts": np.arange(e)[np.arange(e) % LOCAL != 1],
        "twice": np.arange(e).repeat(2),
    }.get(routing, np.arange(e))
    chosen = [rng.choice(allowed, TOP_K, replace=False) for _ in range(tokens)]
    experts = np.array(chosen, np.int32).reshape(tokens, TOP_K)
    if routing == "one expert":
        experts[:] = 1
    # Small whole numbers and halves: fp32 products and sums over D are exact, so that dprobs are exact too.
    x, dy = (round_to(rng.integers(-8, 9, (tokens, D)) / 2, "bfloat16") for _ in range(2))
    probs = rng.integers(1, 512, (tokens, TOP_K)).astype(np.float32) / 512
    factors = np.random.default_rng(7).integers(1, 64, e).astype(np.float32) / 16
    return Case(x, dy, experts, probs, factors)


class Result(NamedTuple):
    y: Any
    dx: Any
    dprobs: Any


def expected(c: Case, recipe: Recipe, weighted: bool) -> Result:
    """With deduplicate="both". dprobs: None without weights."""
    tokens, k = c.experts.shape
    slots = np.arange(tokens * k, dtype=np.int32).reshape(tokens, k)
    token, factor = slots.reshape(-1) // k, c.factors[c.experts.reshape(-1)][:, None]
    probs, rank_of = c.probs if weighted else UNWEIGHTED, c.experts // LOCAL

    def multiply(rows: Array) -> Array:
        return round_to(rows.astype(np.float32) * factor, "bfloat16")

    def total(rows: Array, probs: Array, transfer: TransferName) -> Array:
        return sum_by_rank(rows, slots, probs, rank_of, "bfloat16", recipe.sends_mx(transfer), recipe.rounding)

    rows = multiply(as_sent(c.x, recipe.sends_mx("dispatch"), recipe.rounding)[token])
    mx_grad = recipe.sends_mx("combine_grad")
    dy = as_sent(c.dy, mx_grad, recipe.rounding)
    drows, dprobs = combine_bwd(dy, rows, slots, slots.reshape(-1), probs)
    if weighted:
        drows = as_sent(drows, mx_grad, recipe.rounding)
    dx = total(multiply(drows), UNWEIGHTED, "dispatch_grad")
    return Result(total(rows, probs, "combine"), dx, dprobs if weighted else None)
