"""The Flax module: the functions with its parameters, their shardings on a mesh, and layers stacked for a scan."""

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import MoEConfig, RouterConfig, SharedExpert, moe
from mxep.jax_frontend.integrations.nnx import MoE

from ..references import normal

CONFIG = MoEConfig(64, 96, num_experts=4, router=RouterConfig(top_k=2), recipe="bf16")
X = normal(32, 64, dtype="float32")


def test_the_module_is_the_functions_with_its_parameters() -> None:
    config = dataclasses.replace(CONFIG, bias=True, router=RouterConfig(2, bias=True), shared=SharedExpert(32))
    layer = MoE(config, rngs=nnx.Rngs(0))
    params = moe.init(nnx.Rngs(0).params(), config)
    assert jax.tree.structure(layer.params) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, layer.params, params)
    y, stats = nnx.jit(lambda layer, x: layer(x))(layer, X)
    np.testing.assert_array_equal(y, jax.jit(moe.apply)(params, X, config)[0])
    assert int(stats.counts.sum()) == 64


def test_parameters_are_born_where_the_layer_reads_them() -> None:
    """On data x expert, with weights split over both axes."""
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    tokens = P(("data", "expert"))
    with jax.set_mesh(mesh):
        layer = MoE(CONFIG, rngs=nnx.Rngs(0), tokens=tokens, fsdp_axis="data")
        specs = moe.specs(CONFIG, fsdp_axis="data")
        for name, spec in specs["experts"].items():
            whole = P(*spec, *[None] * (3 - len(spec)))
            assert nnx.get_partition_spec(nnx.state(layer))[name].get_value() == whole
            assert getattr(layer, name)[...].sharding.spec == whole

        @nnx.jit
        def gradient(layer, x):
            return nnx.grad(lambda layer: (layer(x)[0] ** 2).sum())(layer)

        got = gradient(layer, X)
    want = jax.jit(jax.grad(lambda p: (moe.apply(p, X, CONFIG)[0] ** 2).sum()))(moe.init(nnx.Rngs(0).params(), CONFIG))
    for name, value in want["experts"].items():
        np.testing.assert_allclose(got[name][...], value, rtol=2**-7, atol=1e-5 * float(jnp.abs(value).max()))


def test_layers_are_stacked_and_scanned() -> None:
    layers = nnx.vmap(lambda rngs: MoE(CONFIG, rngs=rngs))(nnx.Rngs(0).split(2))
    assert layers.w1.shape == (2, 4, 96, 64)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return x + layer(x)[0]

    x = X
    for i in range(2):
        x = x + jax.jit(moe.apply)(jax.tree.map(lambda p, i=i: p[i], layers.params), x, CONFIG)[0]
    np.testing.assert_allclose(run(layers, X), x, rtol=1e-5, atol=1e-5)


def test_without_flax_the_import_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "mxep.jax_frontend.integrations.nnx")
    with pytest.raises(ImportError, match=r"nnx: flax is missing; install it with `pip install 'mxep\[flax\]'`"):
        importlib.import_module("mxep.jax_frontend.integrations.nnx")
