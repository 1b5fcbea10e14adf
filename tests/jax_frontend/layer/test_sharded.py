"""The layer under jit and shardings alone, on meshes of several axes: values, gradients, collectives."""

import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import MoEConfig, RouterConfig, SharedExpert, moe, quantize_weights

from ...compare import sqnr_db
from ..references import normal

TOKENS, DIM = 100, 64
CONFIG = MoEConfig(DIM, 128, num_experts=8, router=RouterConfig(top_k=2), recipe="bf16")
WITH_ALL = dataclasses.replace(CONFIG, bias=True, router=RouterConfig(2, bias=True), shared=SharedExpert(64))
X = normal(TOKENS, DIM, dtype="float32")
BOTH = P(("data", "expert"))


def mesh_of(kind: AxisType = AxisType.Auto, last: str = "expert") -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("data", last), (kind, kind), devices=jax.devices("cpu")[:4])


def place(tree, specs, mesh):
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tree, specs)


@cache
def params_of(config: MoEConfig):
    """Of `init`, with biases that are not zero."""
    drawn = moe.init(jax.random.key(0), config)
    return jax.tree.map(lambda p: p if p.any() else normal(*p.shape, dtype="float32"), drawn)


def loss(layer: Callable, params, x):
    y, stats = layer(params, x)
    return (y**2).mean() + 0.01 * stats.aux_loss, stats


@cache
def one_device(config: MoEConfig):
    layer = partial(moe.apply, config=config)
    return jax.jit(jax.value_and_grad(partial(loss, layer), (0, 1), has_aux=True))(params_of(config), X)


def collectives(text: str) -> Counter[str]:
    return Counter(re.findall(r" (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\(", text))


# Measured: 133 dB, and 49.3 where sums over hidden values are split into parts that bf16 rounds; less a margin.
def check(
    layer: Callable, config: MoEConfig, mesh, of_x: P, of_params, limit: float = 120, x: jax.Array = X
) -> Counter[str]:
    """The loss, the stats and the gradients equal the results of one device; returns the collectives of the program."""
    arguments = place(params_of(config), of_params, mesh), place(x, of_x, mesh)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(partial(loss, layer), (0, 1), has_aux=True))
        program = step.lower(*arguments).compile()
        (value, stats), grads = program(*arguments)
    (value_1, stats_1), grads_1 = one_device(config)
    np.testing.assert_allclose(value, value_1, rtol=1e-4)
    np.testing.assert_array_equal(stats.counts, stats_1.counts)
    np.testing.assert_allclose(stats.aux_loss, stats_1.aux_loss, rtol=1e-5)
    paths = jax.tree.leaves_with_path(grads_1)
    for (path, want), got in zip(paths, jax.tree.leaves(grads), strict=True):
        assert sqnr_db(np.asarray(got).reshape(want.shape), want) > limit, jax.tree_util.keystr(path)
    return collectives(program.as_text())


EXCHANGES = {"all-to-all": 7}
"""Counts; rows, their probabilities and outputs, and the gradients of these three."""


@pytest.mark.parametrize(
    ("kind", "tokens", "x"),
    [(AxisType.Auto, P("expert", "data"), X.reshape(10, 10, DIM)), (AxisType.Explicit, BOTH, X)],
    ids=["automatic axes", "explicit axes"],
)
def test_under_jit_and_shardings_alone_nothing_is_gathered(kind: AxisType, tokens: P, x: jax.Array) -> None:
    layer = partial(moe.sharded_apply, config=CONFIG, tokens=tokens)
    found = check(layer, CONFIG, mesh_of(kind), tokens, moe.specs(CONFIG), x=x)
    assert found - Counter({"all-reduce": 9}) == EXCHANGES


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_a_shard_map_over_the_experts_alone(kind: AxisType) -> None:
    """The axis of data is automatic around the layer. JAX 0.10.2 gathers at every border of such a shard_map on a mesh
    with explicit axes, also of one around jnp.sin; the numbers are the same."""
    mesh = mesh_of(kind)
    tokens = P(("expert", "data"))

    def layer(params, x):
        inner = partial(moe.sharded_apply, config=CONFIG, tokens=tokens)
        specs = {"router": P(), "experts": P("expert")}, P("expert")
        return jax.shard_map(inner, in_specs=specs, out_specs=(P("expert"), P()), axis_names={"expert"})(params, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = check(layer, CONFIG, mesh, tokens, moe.specs(CONFIG))
    if kind == AxisType.Auto:
        assert found == EXCHANGES | {"all-reduce": 4}


def test_fsdp_gathers_weights_and_scatters_their_gradients() -> None:
    """Each of w1, w2, w3 is gathered over the data axis once, and its gradient is sharded as the weight."""
    mesh, of_params = mesh_of(), moe.specs(CONFIG, fsdp_axis="data")
    layer = partial(moe.sharded_apply, config=CONFIG, tokens=BOTH, fsdp_axis="data")
    found = check(layer, CONFIG, mesh, BOTH, of_params)
    assert found == EXCHANGES | {"all-gather": 3, "reduce-scatter": 3, "all-reduce": 2}
    arguments = place(params_of(CONFIG), of_params, mesh), place(X, BOTH, mesh)
    with jax.set_mesh(mesh):
        grads = jax.jit(jax.grad(partial(loss, layer), has_aux=True))(*arguments)[0]["experts"]
    assert {name: g.sharding.spec for name, g in grads.items()} == of_params["experts"]


def test_tensor_parallel_experts_sum_their_outputs() -> None:
    """On experts x hidden values, with every bias and a shared expert: no gather."""
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    of_params = moe.specs(WITH_ALL, tensor_axis="tensor")
    layer = partial(moe.sharded_apply, config=WITH_ALL, tokens=P("expert"), tensor_axis="tensor")
    found = check(layer, WITH_ALL, mesh, P("expert"), of_params, limit=45)
    assert found == EXCHANGES | {"all-reduce": 4}


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_scan_over_layers_passes_no_empty_array_between_devices(recipe: str) -> None:
    """JAX moves constants of a layer out of the scan, as results of a shard_map; jaxlib 0.11.2 dies where one is
    empty. An argument that is None is an empty array for a kernel alone."""
    config = dataclasses.replace(CONFIG, recipe=recipe)
    layer = partial(moe.sharded_apply, config=config, tokens=BOTH, mesh=mesh_of())

    def layers(params, x):
        return jax.lax.scan(lambda x, p: (x + layer(p, x)[0], None), x, params)[0].sum()

    stacked = jax.tree.map(lambda p: jax.ShapeDtypeStruct((2, *p.shape), p.dtype), params_of(CONFIG))
    text = jax.jit(jax.grad(layers)).lower(stacked, X).as_text()
    assert "sdy.manual_computation" in text
    assert not re.findall(r"^ *} : .*tensor<0x", text, re.MULTILINE)


def test_parameters_are_born_sharded() -> None:
    mesh = mesh_of()
    of_params = moe.specs(WITH_ALL, fsdp_axis="data")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), of_params)
    params = jax.jit(partial(moe.init, config=WITH_ALL), out_shardings=shardings)(jax.random.key(0))
    assert jax.tree.map(lambda p: p.sharding.spec, params) == of_params
    assert params["experts"]["w2"].addressable_shards[0].data.shape == (4, DIM // 2, 128)


def test_quantized_weights_lie_as_the_weights() -> None:
    mesh, config = mesh_of(), dataclasses.replace(CONFIG, recipe="mxfp8")
    params = moe.init(jax.random.key(0), config)
    held = params | {"experts": {n: quantize_weights(w, recipe="mxfp8") for n, w in params["experts"].items()}}
    layer = jax.jit(partial(moe.sharded_apply, config=config, tokens=BOTH, mesh=mesh))
    np.testing.assert_array_equal(layer(held, X)[0], layer(params, X)[0])


def test_quantized_weights_of_tensor_parallel_experts_have_gradients() -> None:
    """Bytes along dim 1 have the dims of the weights in another order."""
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    config = dataclasses.replace(CONFIG, recipe="mxfp8")
    params = moe.init(jax.random.key(0), config)
    held = params | {"experts": {n: quantize_weights(w, recipe="mxfp8") for n, w in params["experts"].items()}}
    layer = partial(moe.sharded_apply, config=config, tokens=P("expert"), tensor_axis="tensor", mesh=mesh)
    gradients = jax.jit(jax.grad(lambda params, x: (layer(params, x)[0] ** 2).sum(), 1))
    np.testing.assert_array_equal(gradients(held, X), gradients(params, X))


MESSAGE = r"^moe.apply: this program is for 4 devices that each gather all tokens .*; moe.sharded_apply"


def test_a_layer_that_is_not_split_warns_at_the_line_of_the_call() -> None:
    mesh = mesh_of()
    params, x = place(params_of(CONFIG), moe.specs(CONFIG), mesh), place(X, BOTH, mesh)
    with pytest.warns(UserWarning, match=MESSAGE) as traced:
        jax.jit(moe.apply, static_argnums=2).lower(params, x, CONFIG)
    assert {warning.filename for warning in traced} == {__file__}

    class WarnedError(Exception):
        """Ends an eager call before it compiles its operations."""

    def end(message: object, category: type, filename: str, *_: object) -> None:
        raise WarnedError(f"{filename}: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = end
        with pytest.raises(WarnedError, match=re.escape(__file__) + ": " + MESSAGE[1:]):
            moe.apply(params, x, CONFIG)

    @partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=(P(), P()), axis_names={"data"})
    def beside_experts(params, x):
        return moe.apply(params, x, CONFIG)

    with pytest.warns(UserWarning, match=MESSAGE.replace("4", "2")):
        jax.jit(beside_experts).lower(params, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(moe.apply, static_argnums=2).lower(params_of(CONFIG), X, CONFIG)
        jax.jit(partial(moe.sharded_apply, config=CONFIG, tokens=BOTH, mesh=mesh)).lower(params, x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": None}, r"mesh: got None; allowed: a jax.sharding.Mesh, or None inside jax.set_mesh"),
        ({"tokens": P("expert", None, "data")}, r"tokens: got .*; allowed: at most 1 parts"),
        ({"tokens": P("data")}, r"expert_axis: got \('expert',\); allowed: axes of tokens"),
        ({"tokens": P(("rows", "expert"))}, r"tokens: got 'rows'; allowed: axes of the mesh, \('data', 'expert'\)"),
        ({"expert_axis": "ep"}, r"expert_axis: got 'ep'; allowed: axes of the mesh"),
        ({"fsdp_axis": "expert"}, r"fsdp_axis: got .*; allowed: axes of tokens, .* not of expert_axis"),
        ({"tensor_axis": "data"}, r"tensor_axis: got 'data'; allowed: an axis that is not in tokens"),
        (
            {"config": dataclasses.replace(CONFIG, num_experts=7)},
            r"config.num_experts: got 7; allowed: multiples of the 2 ranks of mesh axis \('expert',\)",
        ),
        (
            {"x": X[:99]},
            r"x: got 99 rows in dim 0 of \(99, 64\); allowed: multiples of the 4 ranks of .* in tokens; pad x",
        ),
        ({"config": WITH_ALL}, r"params: got \['experts', 'router'\]; allowed: .*'shared_expert'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_specs_that_do_not_fit_are_named(changes: dict, message: str) -> None:
    arguments = {"x": X, "config": CONFIG, "tokens": BOTH, "mesh": mesh_of()} | changes
    with pytest.raises(ValueError, match=message):
        moe.sharded_apply(params_of(CONFIG), **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": None, "token_axes": "expert", "tensor_axis": "expert"}, "tensor_axis: got 'expert'; allowed: "),
        ({"axis_name": "expert", "tensor_axis": "expert"}, "tensor_axis: got 'expert'; allowed: "),
        (
            {"axis_name": "expert", "token_axes": "data"},
            "token_axes: got 'data'; allowed: axes that include ",
        ),
    ],
)
def test_axes_that_contradict_each_other_are_named(options: dict, message: str) -> None:
    params = params_of(CONFIG)

    def layer(x: jax.Array) -> jax.Array:
        return moe.apply(params, x, CONFIG, **options)[0]

    with pytest.raises(ValueError, match=message):
        jax.shard_map(layer, mesh=mesh_of(), in_specs=BOTH, out_specs=BOTH, check_vma=False)(X)


def test_axes_that_do_not_divide_the_weights_are_named() -> None:
    """Three ranks, and hidden values or dims of 64."""
    mesh = jax.make_mesh((1, 3), ("expert", "rest"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:3])
    config, layer = dataclasses.replace(CONFIG, hidden_dim=64), partial(moe.sharded_apply, params_of(CONFIG), X[:99])
    with pytest.raises(
        ValueError, match=r"config.hidden_dim: got 64; allowed: multiples of 96, 32 for each of 3 ranks"
    ):
        layer(config, tokens=P("expert"), tensor_axis="rest", mesh=mesh)
    with pytest.raises(
        ValueError, match=r"config.dim: got 64; allowed: multiples of the 3 ranks of mesh axis \('rest',\)"
    ):
        layer(config, tokens=P(("expert", "rest")), fsdp_axis="rest", mesh=mesh)
    with pytest.raises(TypeError, match=r"tokens: got str; allowed: a jax.sharding.PartitionSpec"):
        layer(config, tokens="expert", mesh=mesh)


def test_hidden_values_that_do_not_divide_are_named() -> None:
    mesh, config = mesh_of(last="tensor"), dataclasses.replace(CONFIG, hidden_dim=96)
    with pytest.raises(
        ValueError, match=r"config.hidden_dim: got 96; allowed: multiples of 64, 32 for each of 2 ranks"
    ):
        moe.sharded_apply(
            moe.init(jax.random.key(0), config), X, config,
            tokens=P("data"), expert_axis=None, tensor_axis="tensor", mesh=mesh,
        )  # fmt: skip


def test_experts_that_the_caller_chose_are_split_with_the_tokens() -> None:
    experts = jnp.arange(TOKENS * 3).reshape(TOKENS, 3) % 8
    weights, bias = jnp.full((TOKENS, 3), 0.25), jnp.linspace(0, 1, 8)
    layer = jax.jit(partial(moe.sharded_apply, config=CONFIG, tokens=BOTH, mesh=mesh_of()))
    got = layer(params_of(CONFIG), X, experts=experts, weights=weights)
    apply = jax.jit(moe.apply)
    want = apply(params_of(CONFIG), X, CONFIG, experts=experts, weights=weights)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    config = dataclasses.replace(CONFIG, router=dataclasses.replace(CONFIG.router, selection_bias=True))
    layer = jax.jit(partial(moe.sharded_apply, config=config, tokens=BOTH, mesh=mesh_of()))
    biased = layer(params_of(config), X, selection_bias=bias)[1].counts
    np.testing.assert_array_equal(biased, apply(params_of(config), X, config, selection_bias=bias)[1].counts)
