"""Frozen weights: bytes along the last dim, whose input gradient is the gradient of the dequantized weights."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import (
    MoEConfig,
    Recipe,
    RouterConfig,
    dense,
    grouped_mm,
    grouped_swiglu_ffn,
    lower_for,
    moe,
    numerics_report,
    quantize_weights,
    ragged_dot_mxfp8,
)

from ..references import kernels, normal
from .test_weights import CONFIG, DY, ENDS, PARAMS, D, F, M, X, same

ODD = jnp.array([40, 40, 100], jnp.int32)
"""No multiples of 32: without a weight gradient no group is padded."""
RECIPES = {
    "mxfp8": Recipe.parse("mxfp8"),
    "fold": Recipe.parse("mxfp8", compute="fold"),
    "floor": Recipe.parse("mxfp8_wgrad_with_hp", rounding="floor"),
    "bf16": Recipe.parse("bf16"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def freeze(params: dict[str, jax.Array], recipe: Recipe = RECIPES["mxfp8"]) -> dict[str, Any]:
    recipe = recipe if recipe.mx else RECIPES["mxfp8"]
    return {name: quantize_weights(w, recipe, frozen=True) for name, w in params.items()}


def product(x: jax.Array, weights: dict[str, Any], recipe: Recipe, ends: jax.Array = ODD) -> jax.Array:
    return grouped_mm(x, weights["w1"], ends, recipe=recipe)


def ffn(x: jax.Array, weights: dict[str, Any], recipe: Recipe, ends: jax.Array = ODD) -> jax.Array:
    return grouped_swiglu_ffn(x, weights["w1"], weights["w3"], weights["w2"], ends, recipe=recipe)


@partial(jax.jit, static_argnums=(0, 4))
def step(run: Any, x: jax.Array, weights: dict[str, Any], dy: jax.Array, recipe: Recipe) -> tuple[jax.Array, Any]:
    """Output and input gradient."""
    out, backward = jax.vjp(lambda x: run(x, weights, recipe), x)
    return out, backward(dy)[0]


@recipes
@pytest.mark.parametrize("run", [product, ffn])
def test_the_forward_is_of_the_weights_and_the_gradient_of_their_bytes(run: Any, recipe: Recipe) -> None:
    frozen = freeze(PARAMS, recipe)
    values = {name: w.dequantize() for name, w in frozen.items()}
    dy = normal(M, F, seed=9) if run is product else DY
    out, dx = step(run, X, frozen, dy, recipe)
    same(out, step(run, X, PARAMS if recipe.mx else values, dy, recipe)[0])
    same(dx, step(run, X, values, dy, recipe)[1])


@pytest.mark.parametrize("compute", ["exact", "fold"])
def test_other_devices_multiply_the_same_bytes(compute: Any) -> None:
    """Made for one architecture, traced for another."""
    recipe, frozen = Recipe.parse("mxfp8", compute=compute), freeze(PARAMS)
    values = {name: w.dequantize() for name, w in frozen.items()}
    with lower_for("sm_90"):
        frozen = freeze(PARAMS)
        same(step(ffn, X, frozen, DY, recipe), step(ffn, X, values, DY, recipe))
    same(freeze(PARAMS), frozen)


@pytest.mark.parametrize("recipe", [RECIPES["mxfp8"], RECIPES["fold"]], ids=["mxfp8", "fold"])
def test_no_weight_gradient_no_padding_no_tokens(recipe: Recipe) -> None:
    frozen = freeze(PARAMS)
    found = kernels(partial(step, ffn, recipe=recipe), X, frozen, DY)
    assert not [name for name in found if "wgrad" in name or "permute" in name or "both" in name or "_all" in name]
    forward = kernels(lambda x: ffn(x, frozen, recipe), X)
    along_n = "quantize_matrix_fold_t" if recipe.compute == "fold" else "quantize_col"
    assert forward[along_n] == forward["dequantize"] == 0
    assert found["dequantize"] == 3, "a backward makes the bytes along N"
    assert found[along_n] == 3


def test_bytes_are_all_that_is_held() -> None:
    """1.03 per weight. A backward keeps them, and neither values nor x."""
    frozen = freeze(PARAMS)
    numel = sum(w.size for w in PARAMS.values())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(frozen)) == numel * 33 / 32
    _, backward = jax.vjp(lambda x: ffn(x, frozen, RECIPES["mxfp8"]), X)
    kept = [leaf for leaf in jax.tree.leaves(backward) if hasattr(leaf, "shape")]
    assert {leaf.dtype.name for leaf in kept if leaf.ndim == 3} == {"uint8"}
    assert sum(leaf.nbytes for leaf in kept if leaf.ndim == 3) == numel * 33 / 32
    assert all(leaf.shape != X.shape for leaf in kept)


def test_the_layer_takes_them() -> None:
    params = moe.init(jax.random.key(0), CONFIG)
    frozen = freeze(params["experts"])

    def layer(router: jax.Array, x: jax.Array, experts: Any) -> jax.Array:
        return moe.apply({"router": router, "experts": experts}, x, CONFIG)[0].astype(jnp.float32).sum()

    gradient = jax.jit(jax.value_and_grad(layer, argnums=(0, 1)))
    values = {name: w.dequantize().astype(jnp.float32) for name, w in frozen.items()}
    same(gradient(params["router"], X, frozen), gradient(params["router"], X, values))
    whole = jax.grad(lambda p: layer(p["router"], X, p["experts"]), allow_int=True)({**params, "experts": frozen})
    assert {leaf.dtype for leaf in jax.tree.leaves(whole["experts"])} == {jax.dtypes.float0}
    assert numerics_report({**params, "experts": frozen}, X, CONFIG).lossy() == ()


@pytest.mark.parametrize("spec", [P("ep"), P()], ids=["sharded by group", "replicated"])
def test_shard_map_takes_one_spec(spec: P) -> None:
    recipe = RECIPES["fold"]
    params = PARAMS if spec else {name: w[:1] for name, w in PARAMS.items()}
    frozen = freeze(params)
    x, ends = jnp.concatenate([X[:64], DY[:64], X[64:128]]), jnp.full(3, 64, jnp.int32)
    layer = jax.shard_map(
        lambda x, weights, ends: ffn(x, weights, recipe, ends),
        mesh=Mesh(np.array(jax.devices("cpu")[:3]), ("ep",)),
        in_specs=(P("ep"), spec, P("ep")),
        out_specs=P("ep"),
    )
    run = jax.jit(jax.value_and_grad(lambda x, weights: layer(x, weights, ends).astype(jnp.float32).sum()))
    same(run(x, frozen), run(x, {name: w.dequantize() for name, w in frozen.items()}))


def test_a_scan_and_a_checkpoint_take_them() -> None:
    w = jnp.stack([PARAMS["w1"][:, :D], PARAMS["w3"][:, :D]])
    frozen = jax.lax.map(partial(quantize_weights, frozen=True), w)

    def layers(x: jax.Array, weights: Any) -> jax.Array:
        body = jax.checkpoint(lambda x, w: (grouped_mm(x, w, ENDS), None))
        return jax.lax.scan(body, x, weights)[0].astype(jnp.float32).sum()

    values = jax.lax.map(lambda w: w.dequantize(), frozen)
    same(jax.jit(jax.grad(layers))(X, frozen), jax.jit(jax.grad(layers))(X, values))


FROZEN, MIXED = freeze(PARAMS), freeze(PARAMS) | {"w2": PARAMS["w2"]}
SQUARE = quantize_weights(normal(1, 64, 64), frozen=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: FROZEN["w1"].with_values(PARAMS["w1"]), TypeError, "values: got an array for frozen weights"),
        (lambda: ffn(X, MIXED, RECIPES["mxfp8"]), ValueError, "w2: got an array .*allowed: w1, w3 and w2 frozen, or"),
        (lambda: grouped_mm(X, FROZEN["w1"], ENDS, recipe="fp8_rowwise"), ValueError,
         "w: got frozen weights with recipe 'fp8_rowwise'; allowed: operands 'mxfp8' or 'bf16'"),
        (lambda: dense(X, SQUARE), ValueError, "dense: w: got frozen weights; .*grouped_mm takes"),
        (lambda: ragged_dot_mxfp8(X, SQUARE, jnp.array([M])), ValueError, "rhs: got frozen weights"),
        (lambda: quantize_weights(PARAMS["w1"], "bf16", frozen=True), ValueError,
         "recipe: got 'bf16' with frozen=True; allowed: one with operands 'mxfp8'"),
        (lambda: quantize_weights(PARAMS["w1"][:, :33], frozen=True), ValueError, "w: got dim 1 = 33"),
        (lambda: quantize_weights(PARAMS["w1"], frozen=1), TypeError, "frozen: got int"),  # type: ignore[arg-type]
        (lambda: moe.apply({"router": jnp.ones((3, D)), "experts": FROZEN}, X,
                           MoEConfig(D, F, 3, RouterConfig(2), recipe="fp8_rowwise")),
         ValueError, "params 'w1': got frozen weights with recipe 'fp8_rowwise'"),
    ],
)  # fmt: skip
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
