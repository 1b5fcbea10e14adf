"""Layers inside a shard_map over all axes of the mesh, and wrong experts on one device of a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import MoEConfig, RouterConfig, moe, save_mx_rows

from ..references import normal

CONFIG = MoEConfig(32, 64, 4, RouterConfig(2), recipe="mxfp8_wgrad_with_hp")
PARAMS = moe.init(jax.random.key(0), CONFIG)
X = normal(64, 32, dtype="float32")
SPECS = {"router": P(), "experts": P("expert")}


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, (kind,) * len(shape), devices=devices)


def test_a_policy_of_names_inside_a_scan_over_layers() -> None:
    """docs/guides/jax_meshes.md: where JAX's nested shard_map has no gradient. The bytes of `sharded_apply`."""
    mesh, tokens = mesh_of((2, 2), ("data", "expert")), P(("data", "expert"))
    layers = jax.tree.map(lambda w: jnp.stack([w, w]), PARAMS)

    def loss(run, layers):
        return (run(layers, X) ** 2).mean()

    def run_layers(layer, layers, x):
        return jax.lax.scan(lambda x, params: (x + layer(params, x)[0], None), x, layers)[0]

    manual = partial(moe.apply, config=CONFIG, axis_name="expert", token_axes=("data", "expert"))
    inside = partial(run_layers, jax.checkpoint(manual, policy=save_mx_rows))
    specs = jax.tree.map(lambda spec: P(None, *spec), SPECS)
    got = jax.shard_map(inside, mesh=mesh, in_specs=(specs, tokens), out_specs=tokens)
    want = partial(run_layers, partial(moe.sharded_apply, config=CONFIG, tokens=tokens, mesh=mesh))
    grads = [jax.jit(jax.grad(partial(loss, run)))(layers) for run in (got, want)]
    jax.tree.map(np.testing.assert_array_equal, *grads)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_an_expert_that_does_not_exist_stops_no_device(kind: AxisType) -> None:
    """A kernel that raises on one device leaves the others waiting, and ends the process."""
    mesh, weights = mesh_of((2,), ("expert",), kind), jnp.ones((64, 2))
    good = jnp.tile(jnp.arange(2), (64, 1)).at[3].set([3, 0])
    bad = good.at[3].set([4, -1])
    if kind == AxisType.Explicit:
        specs = SPECS | {"experts": dict.fromkeys(PARAMS["experts"], P("expert"))}
        params = jax.tree.map(lambda w, spec: jax.device_put(w, jax.NamedSharding(mesh, spec)), PARAMS, specs)
        x, weights, good, bad = (
            jax.device_put(a, jax.NamedSharding(mesh, P("expert"))) for a in (X, weights, good, bad)
        )
    else:
        params, x = PARAMS, X

    @jax.jit
    def layer(experts):
        options = {"tokens": P("expert"), "mesh": mesh, "experts": experts, "weights": weights}
        return moe.sharded_apply(params, x, CONFIG, **options)[0]

    np.testing.assert_array_equal(layer(bad), layer(good))
    checked = checkify.checkify(layer)
    errors = [checked(experts)[0] for experts in (good, bad)]
    if kind == AxisType.Explicit:
        return  # JAX 0.10.2 cannot read an error of a shard_map over explicit axes
    assert errors[0].get() is None
    with pytest.raises(checkify.JaxRuntimeError, match=r"experts: got 4 at index \(3, 0\); allowed: 0 to 3"):
        errors[1].throw()
