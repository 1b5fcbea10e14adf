"""Programs under `jax_numpy_rank_promotion="raise"`, which forbids operands of different numbers of dims."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.jax_frontend import MoEConfig, PeerMemory, RouterConfig, SharedExpert, grouped_mm, moe

from ..references import normal

MESH = Mesh(np.array(jax.devices("cpu")[:2]), ("expert",))
X, W, ENDS = normal(64, 32), normal(2, 32, 32, seed=1), jnp.array([32, 64])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product_with_a_bias(recipe: str) -> None:
    def loss(x, w, bias):
        return grouped_mm(x, w, ENDS, recipe=recipe, bias=bias, out_dtype="float32").sum()

    with jax.numpy_rank_promotion("raise"):
        jax.jit(jax.grad(loss, (0, 1, 2))).lower(X, W, jnp.ones((2, 32)))


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": "fp8_rowwise"},
        {"shared": SharedExpert(32, gate=True)},
        {"capacity_factor": 1.0, "on_overflow": "drop"},
        {"deduplicate": "dispatch"},
        {"deduplicate": "both"},
        {"transport": PeerMemory(MESH, "expert")},
        {"transport": PeerMemory(MESH, "expert"), "on_overflow": "nan"},
    ],
    ids=str,
)
def test_a_layer_with_biases(changes: dict) -> None:
    config = MoEConfig(32, 64, 4, RouterConfig(2, bias=True), bias=True, **changes)
    params = moe.init(jax.random.key(0), config)

    def loss(params, x):
        return moe.sharded_apply(params, x, config, tokens=P("expert"), mesh=MESH)[0].sum()

    with jax.numpy_rank_promotion("raise"):
        jax.jit(jax.grad(loss, (0, 1))).lower(params, X)
