"""Dense layers as Flax modules: parameters of nnx.Linear, shardings, and the conversion of a model."""

import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import Recipe, dense
from mxep.jax_frontend.integrations.nnx_linear import MXLinear, convert_linear

from ...compare import sqnr_db
from ..references import normal

FOLD = Recipe.parse("mxfp8", compute="fold")
X = normal(33, 64, dtype="float32")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.query = nnx.Linear(64, 64, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(64, 32, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(96, 64, rngs=rngs)
        self.router = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        return x + self.wo(jnp.concatenate([self.query(y), self.key(y) * nnx.sigmoid(self.router(y))], -1))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs)])
        self.head = nnx.Linear(64, 128, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def of_blocks(module: nnx.Module, name: str) -> bool | None:
    """The small layers of the blocks; heads and routers are left to the rules."""
    return True if name.rpartition(".")[2] in ("query", "key", "wo") else None


@pytest.mark.parametrize("use_bias", [True, False])
def test_the_module_is_a_linear_with_another_product(use_bias: bool) -> None:
    ours = MXLinear(64, 96, use_bias=use_bias, rngs=nnx.Rngs(0), recipe=FOLD)
    plain = nnx.Linear(64, 96, use_bias=use_bias, rngs=nnx.Rngs(0))
    assert jax.tree.structure(nnx.to_pure_dict(nnx.state(ours))) == jax.tree.structure(
        nnx.to_pure_dict(nnx.state(plain))
    )
    jax.tree.map(np.testing.assert_array_equal, nnx.state(ours), nnx.state(plain))
    y = nnx.jit(lambda layer, x: layer(x))(ours, X)
    bias = ours.bias[...] if use_bias else None
    np.testing.assert_array_equal(y, dense(X, ours.kernel[...], bias, recipe=FOLD))
    assert MXLinear(64, 96, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)(X).dtype == jnp.bfloat16


def test_new_parameters_are_sharded_as_the_specs_say() -> None:
    on = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    with jax.set_mesh(on):
        layer = MXLinear(64, 128, rngs=nnx.Rngs(0), recipe=FOLD, x_spec=P("data"), w_spec=P("data", "model"))
        specs = nnx.get_partition_spec(nnx.state(layer))
        assert (specs["kernel"].get_value(), specs["bias"].get_value()) == (P("data", "model"), P("model"))
        assert layer.kernel[...].sharding.spec == P("data", "model")
        got = nnx.jit(lambda layer, x: layer(x))(layer, X[:32])
    whole = MXLinear(64, 128, rngs=nnx.Rngs(0), recipe=FOLD)
    np.testing.assert_array_equal(got, nnx.jit(lambda layer, x: layer(x))(whole, X[:32]))


def loss_of(model: Model, x: jax.Array) -> jax.Array:
    return ((model(x) - 1) ** 2).mean()


def test_a_model_is_converted_in_place() -> None:
    model, plain = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    before, block = nnx.state(model), model.layers[0].query
    report = convert_linear(model, of_blocks, FOLD)
    assert report.converted == ("layers.0.key", "layers.0.query", "layers.0.wo")
    assert dict(report.others) == {"head": "a head", "layers.0.router": "a router"}
    assert model.layers[0].query is block
    assert isinstance(block, MXLinear)
    assert nnx.state(model).keys() == before.keys()
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)

    gradients = [nnx.jit(nnx.grad(loss_of))(of, X) for of in (model, plain)]
    pairs = zip(*map(jax.tree.leaves, gradients), strict=True)
    # dB between the gradients of MXFP8 and fp32: measured at least 24.9, less 3.
    found = min(sqnr_db(got, want) for got, want in pairs)
    assert found > 21.9, found
    assert convert_linear(model, of_blocks, "bf16").converted == report.converted
    assert block.recipe.name == "bf16"


def test_a_converted_model_trains() -> None:
    model = Model(nnx.Rngs(0))
    convert_linear(model, of_blocks, FOLD)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train(model: Model, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model, X)
        optimizer.update(model, grads)
        return loss

    losses = [float(train(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.2 * losses[0], losses


def test_small_layers_gain_together() -> None:
    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.query = nnx.Linear(2048, 1024, rngs=rngs)
            self.key = nnx.Linear(2048, 512, rngs=rngs)
            self.value = nnx.Linear(2048, 512, rngs=rngs)
            self.out = nnx.Linear(1024, 2048, rngs=rngs)

    model = nnx.eval_shape(lambda: Attention(nnx.Rngs(0)))
    report = convert_linear(model)
    assert report.converted == ("key", "query", "value")
    assert dict(report.others) == {"out": "too small to gain, N K / (N + K) = 683"}


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)
        self.second.kernel = self.first.kernel


class Other(nnx.Linear):
    pass


BAD: dict[str, Any] = {
    "small": (ValueError, r"model: got layers\.0: too small to gain", lambda: nnx.Sequential(_linear()), None),
    "none": (ValueError, r"model: got LayerNorm without one", lambda: nnx.LayerNorm(64, rngs=nnx.Rngs(0)), None),
    "tied": (ValueError, r"first\.kernel: got a kernel tied to second\.kernel", lambda: Tied(nnx.Rngs(0)), bool),
    "N": (ValueError, r"layers\.0: got N = 40; allowed: positive", lambda: nnx.Sequential(_linear(n=40)), bool),
    "a subclass": (TypeError, r"layers\.0: got a Other", lambda: nnx.Sequential(Other(64, 64, rngs=nnx.Rngs(0))), bool),
    "half": (
        TypeError,
        r"layers\.0\.kernel: got dtype float16",
        lambda: nnx.Sequential(_linear(dtype=jnp.float16)),
        bool,
    ),
    "computed in half": (
        TypeError,
        r"layers\.0: got dtype .*float16.*; allowed: bfloat16 or float32",
        lambda: nnx.Sequential(nnx.Linear(64, 64, dtype=jnp.float16, rngs=nnx.Rngs(0))),
        bool,
    ),
    "a product of its own": (
        ValueError,
        r"layers\.0: got precision of its own; allowed: nnx.Linear's defaults",
        lambda: nnx.Sequential(nnx.Linear(64, 64, precision="highest", rngs=nnx.Rngs(0))),
        bool,
    ),
    "products of their own": (
        ValueError,
        r"model: got layers\.0: dot_general of its own",
        lambda: nnx.Sequential(nnx.Linear(2048, 2048, dot_general=lambda *a, **k: a[0], rngs=nnx.Rngs(0))),
        None,
    ),
}


def _linear(n: int = 64, dtype: Any = jnp.float32) -> nnx.Linear:
    return nnx.Linear(64, n, param_dtype=dtype, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_changes_nothing(name: str) -> None:
    error, message, build, every = BAD[name]
    model = build()
    with pytest.raises(error, match=f"convert_linear: {message}"):
        convert_linear(model, None if every is None else lambda module, name: True)
    assert not [module for _, module in nnx.iter_modules(model) if isinstance(module, MXLinear)]


def test_bad_sizes_and_specs() -> None:
    with pytest.raises(ValueError, match=r"MXLinear: in_features: got 40; allowed: positive multiples of 32"):
        MXLinear(40, 64, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"MXLinear: x_spec, w_spec: got one of them; allowed: both, or none"):
        MXLinear(64, 64, rngs=nnx.Rngs(0), x_spec=P())
    with pytest.raises(ValueError, match=r"MXLinear: out_sharding: got P\(\); allowed: None"):
        MXLinear(64, 64, rngs=nnx.Rngs(0))(X, P())  # type: ignore[arg-type]


def test_without_flax_the_import_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "mxep.jax_frontend.integrations.nnx_linear")
    with pytest.raises(ImportError, match=r"nnx_linear: flax is missing; install it with `pip install 'mxep\[flax\]'`"):
        importlib.import_module("mxep.jax_frontend.integrations.nnx_linear")
