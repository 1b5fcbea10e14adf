"""Weights quantized once: the bytes and gradients of weights that are quantized where they are used."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.formats import WEIGHT_HEADROOM
from mxep.jax_frontend import (
    MoEConfig,
    Recipe,
    RouterConfig,
    grouped_mm,
    grouped_swiglu_ffn,
    lower_for,
    moe,
    ops,
    quantize_weights,
    ragged_dot_mxfp8,
)
from mxep.jax_frontend.products.weights import QuantizedWeights, along_k, format_of, quantize_for_call

from ..references import kernels, normal, results

M, D, F, SIZES = 160, 64, 96, [64, 0, 96]
ENDS = jnp.asarray(np.cumsum(SIZES), jnp.int32)
X, DY, DOUT = normal(M, D), normal(M, D, seed=1), normal(M, F, seed=6)
PARAMS = {
    name: normal(3, *shape, seed=seed, dtype="float32") / 8
    for name, seed, shape in (("w1", 2, (F, D)), ("w3", 3, (F, D)), ("w2", 4, (D, F)))
}
CHOICES = {
    "bf16": Recipe.parse("bf16"),
    "exact": Recipe.parse("mxfp8_wgrad_with_hp", rounding="floor"),
    "fold": Recipe.parse("mxfp8_wgrad_with_hp", compute="fold"),
    "row": Recipe.parse("fp8_rowwise"),
    "block": Recipe.parse("fp8_blockwise", scales="power_of_two"),
    "mxfp8 exact": Recipe.parse("mxfp8"),
    "mxfp8 fold": Recipe.parse("mxfp8", compute="fold"),
}
recipes = pytest.mark.parametrize("recipe", CHOICES.values(), ids=CHOICES)


def same(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(g, w)


def quantize_all(params: dict, recipe: Recipe | str) -> dict[str, QuantizedWeights]:
    return {name: quantize_weights(w, recipe=recipe) for name, w in params.items()}


def put_in(cached: dict[str, QuantizedWeights], params: dict) -> dict[str, QuantizedWeights]:
    return {name: weights.with_values(params[name]) for name, weights in cached.items()}


def ffn(x, weights, recipe, ends=ENDS):
    weights = weights["w1"], weights["w3"], weights["w2"]
    return grouped_swiglu_ffn(x, *weights, ends, recipe=recipe, pad_token_groups=False)


def loss(x, weights, dy, recipe):
    return (ffn(x, weights, recipe) * dy).astype(jnp.float32).sum()


@partial(jax.jit, static_argnames="recipe")
def of_cached(x, params, cached, dy, recipe):
    return jax.value_and_grad(lambda x, p: loss(x, put_in(cached, p), dy, recipe), argnums=(0, 1))(x, params)


@partial(jax.jit, static_argnames="recipe")
def of_arrays(x, params, dy, recipe):
    return jax.value_and_grad(loss, argnums=(0, 1))(x, params, dy, recipe)


def test_the_bytes_are_those_of_the_ops() -> None:
    w = PARAMS["w1"]
    rows, columns = ops.quantize_row(w), ops.quantize_col(w)
    got = quantize_weights(w, recipe=Recipe.parse("mxfp8", compute="exact"))
    same((got.as_stored, got.transposed), (tuple(rows), tuple(columns)))
    got = jax.jit(partial(quantize_weights, recipe=Recipe.parse("mxfp8", compute="fold")))(w)
    folded = (tuple(ops.fold_rows(*pair, headroom=WEIGHT_HEADROOM)) for pair in (rows, columns))
    same((tuple(got.as_stored), tuple(got.transposed)), tuple(folded))
    got = quantize_weights(w, recipe="bf16")
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [jnp.float32]


@recipes
def test_the_feed_forward_and_its_gradients_are_those_of_arrays(recipe: Recipe) -> None:
    cached = quantize_all(PARAMS, recipe)
    same(of_cached(X, PARAMS, cached, DY, recipe), of_arrays(X, PARAMS, DY, recipe))


@recipes
def test_the_product_and_its_gradients_are_those_of_an_array(recipe: Recipe) -> None:
    w, cached = PARAMS["w1"], quantize_weights(PARAMS["w1"], recipe=recipe)

    def multiply(x, w, cached=None):
        w = w if cached is None else cached.with_values(w)
        return grouped_mm(x, w, ENDS, recipe=recipe, pad_token_groups=False)

    want = results(multiply, DOUT, X, w)
    for f in (multiply, jax.checkpoint(multiply)):
        same(results(partial(f, cached=cached), DOUT, X, w), want)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_way_and_both_ways_fold_to_the_same_bytes(dtype: str, rounding: str) -> None:
    """Of weights with rows and columns whose largest scale is not among the first 256 values, and with others."""
    w = (normal(2, 320, 352, dtype="float32") / normal(2, 320, 352, seed=1, dtype="float32")).astype(dtype)
    recipe = Recipe.parse("mxfp8", compute="fold", rounding=rounding)
    form = format_of(recipe)
    forward, differentiated = quantize_for_call(w, form, backward=False), quantize_for_call(w, form, backward=True)
    same(tuple(forward.as_stored), tuple(differentiated.as_stored))
    same(tuple(forward.transposed), tuple(differentiated.transposed))
    same(tuple(along_k(w, form)), tuple(differentiated.as_stored))
    needed = ops.quantize_row_fold(w, rounding=rounding)[1]
    assert (forward.as_stored.sf == needed).any()
    assert (forward.as_stored.sf > needed).any()


@recipes
def test_no_weight_is_quantized_where_it_is_used(recipe: Recipe) -> None:
    """What is quantized is rows and tokens, in the products as in the gradients."""
    cached = quantize_all(PARAMS, recipe)
    arrays = kernels(partial(of_arrays, recipe=recipe), X, PARAMS, DY)
    got = kernels(partial(of_cached, recipe=recipe), X, PARAMS, cached, DY)
    expected = arrays - kernels(lambda p: quantize_all(p, recipe), PARAMS)
    assert got == expected
    once = {
        "bf16": {},
        "mx": {"quantize_both": 3},
        "fold": {"quantize_matrix_fold": 3},
        "row": {"quantize_rowwise": 6},
        "block_power_of_two": {"quantize_squares_both": 3},
    }
    assert arrays - got == once[recipe.form("cpu")], "three weights, both ways"
    rows_only = kernels(lambda x: ffn(x, cached, recipe), X)
    # x, and h where SwiGLU does not
    once = {"quantize_row": 1, "quantize_row_fold": 1, "quantize_rowwise": 2, "quantize_blockwise": 1}
    assert {k: n for k, n in rows_only.items() if "quantize" in k}.items() <= once.items()


EXACT = Recipe.parse("mxfp8", compute="exact")


def test_exact_products_on_hopper_dequantize_them_once() -> None:
    """Run on this machine's CPU, though traced for Hopper."""
    with lower_for("sm_90"):
        cached = quantize_all(PARAMS, EXACT)
        same(of_cached(X, PARAMS, cached, DY, EXACT), of_arrays(X, PARAMS, DY, EXACT))
        found = kernels(partial(of_cached, recipe=EXACT), X, PARAMS, cached, DY)
        assert kernels(lambda p: quantize_all(p, EXACT), PARAMS)["dequantize"] == 6
    assert found["dequantize"] == 5 + 5, "rows of x, h and three gradients, tokens of the same"
    w = PARAMS["w1"]
    kept = cached["w1"].as_stored, cached["w1"].transposed
    same(tuple(k.x for k in kept), tuple(ops.dequantize(*f(w)) for f in (ops.quantize_row, ops.quantize_col)))


@pytest.mark.parametrize(("made_for", "used_for"), [("sm_90", "sm_100"), ("sm_100", "sm_90")])
def test_exact_products_take_weights_that_another_device_made(made_for: str, used_for: str) -> None:
    with lower_for(made_for):
        cached = quantize_all(PARAMS, EXACT)
    with lower_for(used_for):
        same(of_cached(X, PARAMS, cached, DY, EXACT), of_arrays(X, PARAMS, DY, EXACT))


def test_what_stands_for_bytes_in_bf16_has_no_gradient() -> None:
    with lower_for("sm_90"):
        cached = quantize_all(PARAMS, EXACT)
        grads = jax.jit(jax.grad(lambda w: loss(X, w, DY, EXACT)))(cached)
        _, (_, want) = of_arrays(X, PARAMS, DY, EXACT)
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad.values, want[name])
        assert not any(leaf.any() for leaf in (*grad.as_stored, *grad.transposed))


def test_of_weights_a_backward_keeps_the_bytes_alone() -> None:
    cached = quantize_all(PARAMS, "mxfp8")
    _, backward = jax.vjp(lambda x, p: ffn(x, put_in(cached, p), "mxfp8"), X, PARAMS)
    kept = [leaf for leaf in jax.tree.leaves(backward) if leaf.ndim == 3]
    assert {leaf.dtype.name for leaf in kept} == {"uint8"}
    assert len(kept) == 3 * 2, "q and sf of the transposed"


@recipes
def test_a_backward_keeps_the_bytes_that_it_multiplies(recipe: Recipe) -> None:
    """Of weights that the forward quantized; where x has no gradient it multiplies none of w1 and w3."""
    _, backward = jax.vjp(lambda x, p: ffn(x, p, recipe), X, PARAMS)
    kept = sorted((a.dtype.name, a.shape) for a in jax.tree.leaves(backward) if a.shape in ((3, F, D), (3, D, F)))
    transposed = [("uint8", PARAMS[name].mT.shape) for name in ("w2", "w1", "w3")]
    lie = [("float32", PARAMS[name].shape) for name in ("w2", "w1", "w3")]
    assert kept == sorted(lie if recipe.name == "bf16" else transposed)


def test_weights_that_no_input_gradient_reads_are_not_transposed() -> None:
    """Where x has no gradient: w1 and w3. One traced function serves this gradient and the gradient of x."""
    layer = jax.jit(partial(ffn, recipe=EXACT))

    def gradient(argnums):
        return jax.jit(jax.grad(lambda x, p: (layer(x, p) * DY).astype(jnp.float32).sum(), argnums))

    text = gradient(1).lower(X, PARAMS).compile().as_text()
    found = {
        op: text.count(f'custom_call_target="mxep.{op}"') for op in ("quantize_row", "quantize_col", "quantize_both")
    }
    assert found == {"quantize_row": 3, "quantize_col": 1, "quantize_both": 2}, "x, w1, w3; x's tokens; w2, dout"
    (dx, both), alone = gradient((0, 1))(X, PARAMS), gradient(1)(X, PARAMS)
    same(both, alone)
    assert np.isfinite(np.asarray(dx, np.float32)).all()


def test_one_quantization_serves_the_microbatches_of_a_step() -> None:
    batches, recipe = [(X, DY), (DY, X)], CHOICES["exact"]

    @jax.jit
    def step(params, batches):
        cached = quantize_all(params, recipe)
        grads = [jax.grad(lambda p, x=x, dy=dy: loss(x, put_in(cached, p), dy, recipe))(params) for x, dy in batches]
        return jax.tree.map(jnp.add, *grads)

    parts = [of_arrays(x, PARAMS, dy, recipe)[1][1] for x, dy in batches]
    same(step(PARAMS, batches), jax.tree.map(jnp.add, *parts))
    assert kernels(step, PARAMS, batches)["quantize_both"] == 3


def test_a_gradient_of_the_whole_has_float0_for_bytes() -> None:
    recipe = CHOICES["mxfp8 exact"]
    cached = quantize_all(PARAMS, recipe)
    grads = jax.jit(jax.grad(lambda w: loss(X, w, DY, recipe), allow_int=True))(cached)
    _, (_, want) = of_arrays(X, PARAMS, DY, recipe)
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad.values, want[name])
        assert {leaf.dtype for leaf in (*grad.as_stored, *grad.transposed)} == {jax.dtypes.float0}


def test_quantized_inside_the_differentiated_function_the_gradient_is_the_same() -> None:
    recipe = CHOICES["mxfp8 exact"]

    def inside(x, params, dy):
        return loss(x, quantize_all(params, recipe), dy, recipe)

    got = jax.jit(jax.value_and_grad(inside, argnums=(0, 1)))(X, PARAMS, DY)
    same(got, of_arrays(X, PARAMS, DY, recipe))


@pytest.mark.parametrize("spec", [P("ep"), P()], ids=["sharded by group", "replicated"])
def test_shard_map_takes_one_spec_for_values_and_bytes(spec: P) -> None:
    recipe = Recipe.parse("mxfp8", compute="fold")
    params = PARAMS if spec else {name: w[:1] for name, w in PARAMS.items()}
    cached = quantize_all(params, recipe)
    x, ends = jnp.concatenate([X[:64], DY[:64], X[64:128]]), jnp.full(3, 64, jnp.int32)
    layer = jax.shard_map(
        lambda x, weights, ends: ffn(x, weights, recipe, ends),
        mesh=Mesh(np.array(jax.devices("cpu")[:3]), ("ep",)),
        in_specs=(P("ep"), spec, P("ep")),
        out_specs=P("ep"),
    )

    @jax.jit
    def run(params, cached=None):
        return jax.value_and_grad(
            lambda p: layer(x, put_in(cached, p) if cached else p, ends).astype(jnp.float32).sum()
        )(params)

    same(run(params, cached), run(params))


def test_a_scan_over_layers_takes_them_stacked() -> None:
    w = jnp.stack([PARAMS["w1"][:, :D], PARAMS["w3"][:, :D]])
    cached = jax.lax.map(quantize_weights, w)

    def layers(w, cached=None):
        weights = w if cached is None else cached.with_values(w)
        return jax.lax.scan(lambda x, w: (grouped_mm(x, w, ENDS), None), X, weights)[0].astype(jnp.float32).sum()

    same(jax.jit(jax.grad(partial(layers, cached=cached)))(w), jax.jit(jax.grad(layers))(w))


CONFIG = MoEConfig(D, F, num_experts=4, router=RouterConfig(top_k=2))


def test_the_layer_takes_them() -> None:
    params = moe.init(jax.random.key(0), CONFIG)
    cached = quantize_all(params["experts"], CONFIG.recipe)

    def layer(params, x, cached=None):
        experts = put_in(cached, params["experts"]) if cached else params["experts"]
        return moe.apply({**params, "experts": experts}, x, CONFIG)[0].astype(jnp.float32).sum()

    got = jax.jit(jax.value_and_grad(partial(layer, cached=cached), argnums=(0, 1)))(params, X)
    same(got, jax.jit(jax.value_and_grad(layer, argnums=(0, 1)))(params, X))


CACHED, FOLDED = quantize_all(PARAMS, "mxfp8"), quantize_all(PARAMS, Recipe.parse("mxfp8", compute="fold"))
FLOOR = quantize_weights(PARAMS["w1"], recipe=Recipe.parse("mxfp8", rounding="floor"))
HALF = dataclasses.replace(CACHED["w1"], values=PARAMS["w1"].astype("float16"))


def for_hopper():
    with lower_for("sm_90"):
        grouped_mm(X, CACHED["w1"], ENDS)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grouped_mm(X, FOLDED["w1"], ENDS), ValueError, "w: got .* form 'fold' .* form 'mx' "),
        (for_hopper, ValueError, "w: got .* form 'mx' .* form 'fold' .*; call quantize_weights"),
        (lambda: grouped_mm(X, CACHED["w1"], ENDS, recipe="bf16"), ValueError, "form 'mx' .* form 'bf16' "),
        (lambda: grouped_mm(X, FLOOR, ENDS), ValueError, "'mx' with FLOOR; allowed: form 'mx' with RCEIL"),
        (lambda: grouped_mm(X, HALF, ENDS), TypeError, "w: got dtype float16"),
        (lambda: ffn(X, CACHED | {"w2": FOLDED["w2"]}, "mxfp8"), ValueError, "grouped_swiglu_ffn: w2: got .* 'fold'"),
        (lambda: ffn(X, CACHED | {"w2": CACHED["w1"]}, "mxfp8"), ValueError, "w2: got shape"),
        (lambda: ragged_dot_mxfp8(X, FOLDED["w2"], ENDS), ValueError, "ragged_dot_mxfp8: rhs: got .* 'fold'"),
        (
            lambda: moe.apply({"router": jnp.ones((3, D)), "experts": FOLDED}, X, MoEConfig(D, F, 3, RouterConfig(2))),
            ValueError, "params 'w1': got .* form 'fold' .*as recipe 'mxfp8' multiplies here",
        ),
        (lambda: CACHED["w1"].with_values(PARAMS["w2"]), ValueError, r"values: got shape .*allowed: \(3, 96, 64\)"),
        (lambda: CACHED["w1"].with_values([1.0]), TypeError, "values: got list"),
        (lambda: quantize_weights(PARAMS["w1"][0]), ValueError, r"w: got shape .*\(G, N, K\)"),
        (lambda: quantize_weights(PARAMS["w1"][:, :33]), ValueError, "w: got dim 1 = 33"),
        (lambda: quantize_weights(PARAMS["w1"][..., :33]), ValueError, "w: got dim 2 = 33"),
        (lambda: quantize_weights(PARAMS["w1"].astype(int)), TypeError, "w: got dtype int32"),
        (lambda: quantize_weights(PARAMS["w1"], recipe="fp4"), ValueError, "recipe: got 'fp4'"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
