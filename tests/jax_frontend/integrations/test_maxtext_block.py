"""The products of MaxText's sparse block, imitated: its branch without megablox, with ragged_dot_mxfp8 in place.

MaxText needs Python 3.12. This file repeats what its layers/moe.py (0.2.5) does around `jax.lax.ragged_dot`;
`python -m examples.integrations.maxtext_block` runs the package itself (docs/guides/maxtext.md).

tokens --sort--> rows, sizes --cast to bf16, XLA metadata--> wi_0, wi_1 --names, silu--> wo --unsort, weights--> y
inside a shard_map over every axis of the mesh: rows over "fsdp", wi and wo split along the hidden dim over "tensor"
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import ragged_dot_mxfp8

from ...compare import sqnr_db
from ..references import normal

EXPERTS, TOP_K, DIM, HIDDEN, TOKENS = 4, 2, 64, 128, 64
X, LOGITS = normal(TOKENS, DIM), normal(TOKENS, EXPERTS, seed=1, dtype="float32")
WEIGHTS = {
    "wi_0": normal(EXPERTS, DIM, HIDDEN, seed=2, dtype="float32"),
    "wi_1": normal(EXPERTS, DIM, HIDDEN, seed=3, dtype="float32"),
    "wo": normal(EXPERTS, HIDDEN, DIM, seed=4, dtype="float32"),
}
SPECS = {"wi_0": P(None, "fsdp", "tensor"), "wi_1": P(None, "fsdp", "tensor"), "wo": P(None, "tensor", "fsdp")}


def block(dot: Callable[..., Any], weights: dict[str, jax.Array], x: jax.Array, logits: jax.Array) -> jax.Array:
    """One device's part."""
    probs, experts = jax.lax.top_k(jax.nn.softmax(logits), TOP_K)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
    rows = x[order // TOP_K]

    def gmm(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
        with set_xla_metadata(ragged_dot_tiling="64,64,64", mosaic_fusion_group="0"):
            return dot(
                lhs=inputs.astype(jnp.bfloat16),
                rhs=kernel.astype(jnp.bfloat16),
                group_sizes=sizes,
                preferred_element_type=jnp.bfloat16,
            )

    kernels = {
        name: jax.lax.all_gather(w, "fsdp", axis=SPECS[name].index("fsdp"), tiled=True) for name, w in weights.items()
    }
    gate = checkpoint_name(gmm(rows, kernels["wi_0"]), "moe_mlpwi_0")
    up = checkpoint_name(gmm(rows, kernels["wi_1"]), "moe_mlpwi_1")
    out = checkpoint_name(jax.lax.psum(gmm(jax.nn.silu(gate) * up, kernels["wo"]), "tensor"), "moe_mlpwo")
    unsorted = out[jnp.argsort(order)].reshape(-1, TOP_K, DIM)
    return jnp.einsum("tkd,tk->td", unsorted.astype(jnp.float32), probs)


def gradients(dot: Callable[..., Any]) -> tuple[jax.Array, Any]:
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    specs = SPECS, P("fsdp"), P("fsdp")
    policy = jax.checkpoint_policies.save_only_these_names("moe_mlpwi_0", "moe_mlpwi_1")
    layer = jax.checkpoint(partial(block, dot), policy=policy)
    layer = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("fsdp"))

    def loss(weights: dict[str, jax.Array], x: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = layer(weights, x, logits)
        return (y * jnp.linspace(-1, 1, DIM)).mean(), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(WEIGHTS, X, LOGITS)
    return y, grads


@pytest.fixture(scope="module")
def own() -> tuple[jax.Array, Any]:
    return gradients(jax.lax.ragged_dot)


@pytest.mark.parametrize(("recipe", "limit"), [("bf16", 50), ("mxfp8", 20), ("mxfp8_wgrad_with_hp", 20)])
def test_the_block_and_its_gradients(own: tuple[jax.Array, Any], recipe: str, limit: float) -> None:
    """Against the block itself in bf16. Measured: 56.0, 21.6 and 22.0 dB at least; less a margin."""
    got = gradients(partial(ragged_dot_mxfp8, recipe=recipe))
    for (path, mine), theirs in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(own), strict=True):
        assert mine.dtype == theirs.dtype
        assert sqnr_db(np.asarray(mine, np.float32), np.asarray(theirs, np.float32)) > limit, jax.tree_util.keystr(path)
