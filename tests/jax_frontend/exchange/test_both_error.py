"""The error of `deduplicate="both"` against None on four devices: the table of docs/concepts/deduplicate.md."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.policy.deduplicate import Deduplicate
from mxep.core_kernels.policy.recipe import Recipe
from mxep.jax_frontend import TokenReplicas, combine, dispatch, dispatch_probs, grouped_swiglu_ffn, sort_by_expert

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "deduplicate.md"
RANKS, T, D, F, E, K = 4, 96, 128, 128, 16, 8
MARGIN_DB = 0.2


@cache
def inputs() -> tuple[Any, ...]:
    """x, w1, w3, w2, probs, the chosen experts, and the gradient of y; of all ranks."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.standard_normal((RANKS * T, D)), jnp.bfloat16) for _ in range(2))
    weights = [rng.standard_normal(shape) * shape[-1] ** -0.5 for shape in ((E, F, D), (E, F, D), (E, D, F))]
    experts = np.argsort(rng.random((RANKS * T, E)), axis=1)[:, :K].astype(np.int32)
    probs = rng.random((RANKS * T, K), np.float32)
    return x, *(jnp.asarray(w, jnp.float32) for w in weights), probs, experts, dy


def layer(recipe: Recipe, prob_in: str, how: Deduplicate) -> dict[str, np.ndarray]:
    """y and the gradients of x, w1, w2 and the probabilities."""
    *primals, experts, dy = inputs()

    def of_a_rank(x: Any, w1: Any, w3: Any, w2: Any, probs: Any, experts: Any) -> jax.Array:
        order, inverse, counts = sort_by_expert(experts, E)
        tokens = TokenReplicas(x, order, inverse, K)
        groups, _, route = dispatch(tokens, counts, axis_name="ep", recipe=recipe, deduplicate=how)
        inside = dispatch_probs(probs, route) if prob_in == "swiglu" else None
        out = grouped_swiglu_ffn(
            groups, w1, w3, w2, route, prob=inside, recipe=recipe, pad_token_groups=False, mx_grad=recipe.mx
        )
        return combine(out, route, probs if inside is None else None)

    mesh = jax.make_mesh((RANKS,), ("ep",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:RANKS])
    spec = P("ep")
    sharded: Any = jax.shard_map(of_a_rank, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec)
    y, backward = jax.jit(lambda *p: jax.vjp(lambda *q: sharded(*q, experts), *p))(*primals)
    dx, dw1, _, dw2, dprobs = jax.jit(backward)(dy.astype(y.dtype))
    found = {"y": y, "dx": dx, "dw1": dw1, "dw2": dw2, "dprobs": dprobs}
    return {name: np.asarray(array, np.float64) for name, array in found.items()}


def measured(recipe: str, prob_in: str) -> list[str]:
    """The cells of a row: dB, or equal."""
    none, both = (layer(Recipe.parse(recipe), prob_in, how) for how in (None, "both"))
    noise = {name: np.square(both[name] - want).sum() for name, want in none.items()}
    return [
        f"{10 * np.log10(np.square(want).sum() / noise[name]):.1f}" if noise[name] else "equal"
        for name, want in none.items()
    ]


def rows_of_the_page() -> list[tuple[str, str, list[str]]]:
    pattern = r"^\| `(bf16|mxfp8)` \| `(\w+)` \| (.*) \|$"
    return [
        (recipe, prob_in, row.split(" | "))
        for recipe, prob_in, row in re.findall(pattern, PAGE.read_text(), re.MULTILINE)
    ]


def test_the_page_has_rows() -> None:
    assert len(rows_of_the_page()) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "prob_in", "page"), rows_of_the_page())
def test_the_page_has_what_is_measured(recipe: str, prob_in: str, page: list[str]) -> None:
    found = measured(recipe, prob_in)
    print(recipe, prob_in, " | ".join(found))
    for got, figure in zip(found, page, strict=True):
        assert got == figure or abs(float(got) - float(figure)) <= MARGIN_DB, (found, page)
