"""The contracts of docs/determinism.md in JAX, on CPU devices: pairs of the table; slow: all recipes, a product."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.jax_frontend import moe, quantize_weights
from mxep.jax_frontend.routing.router import tokens_and_logits

from .jax_layers import EXPERTS, config_of, inputs, layer_of, params_of, replay, same, step_of
from .table import JAX, JAX_OFTEN, JAX_PRODUCT, Row, all_rows, allowed, name_of, pairwise

RANKS = 2
ROW: Row = {"exchange": "all-to-all", "recipe": "mxfp8", "prob_in": "swiglu", "extras": "plain", "dtype": "float32"}


@pytest.mark.parametrize("row", pairwise(JAX_OFTEN, allowed), ids=name_of)
def test_replay(row: Row) -> None:
    """Found with it: two sums of XLA in the gradients of fp32 x and of the router, other bits where the forward is
    recomputed."""
    replay(row, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("row", pairwise(JAX, allowed), ids=name_of)
def test_replay_with_every_recipe(row: Row) -> None:
    replay(row, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("row", all_rows(JAX_PRODUCT, allowed), ids=name_of)
def test_replay_of_a_product(row: Row) -> None:
    replay(row, RANKS)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_forwards(recipe: str) -> None:
    """The forward of training, the forward alone, and the forward of quantized weights, of half of the tokens too."""
    row = {**ROW, "recipe": recipe, "exchange": "one device"}
    config = config_of(row)
    params, (x, dy) = params_of(config, "float32"), inputs(row)
    want = step_of(layer_of(config, "one device", 1))(params, x, dy)["y"]
    quantized = {name: quantize_weights(params["experts"][name], config.recipe) for name in ("w1", "w3", "w2")}
    forward = jax.jit(partial(moe.apply, config=config))
    for of in (params, params | {"experts": params["experts"] | quantized}):
        same(forward(of, x)[0], want)
        same(forward(of, x[::2])[0], want[::2])


def test_ranks() -> None:
    """One device, and 1, 2 and 4 ranks: y, counts, and the gradients of x and of the experts to the bit. The gradient
    of the router is a sum over ranks."""
    config = config_of(ROW)
    params, (x, dy) = params_of(config, "float32"), inputs(ROW)
    want = step_of(layer_of(config, "one device", 1))(params, x, dy)
    for ranks in (1, 2, 4):
        got = step_of(layer_of(config, "all-to-all", ranks))(params, x, dy)
        router, of_one = got["params"].pop("router"), jnp.asarray(want["params"]["router"])
        np.testing.assert_allclose(router, of_one, rtol=0, atol=1e-6 * float(abs(of_one).max()))  # measured: 1.6e-7
        np.testing.assert_allclose(got.pop("aux_loss"), want["aux_loss"], rtol=1e-6)
        kept = {**want, "params": {"experts": want["params"]["experts"]}}
        del kept["aux_loss"]
        same(got, kept)
        assert int(got["counts"].sum()) == 2 * len(x)
        assert len(got["counts"]) == EXPERTS


def test_exception_of_one_row_of_the_router() -> None:
    """As in PyTorch. Measured: 6.5e-8 of the largest logit."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((64, 256)).astype(np.float32), (rng.standard_normal((8, 256)) / 16).astype(np.float32)
    logits = jax.jit(lambda x, w: tokens_and_logits(x, w, None)[1])
    together = np.asarray(logits(x, w))
    np.testing.assert_array_equal(logits(x[:2], w), together[:2])
    for i in range(8):
        np.testing.assert_allclose(logits(x[i : i + 1], w)[0], together[i], rtol=0, atol=1e-6 * abs(together).max())
