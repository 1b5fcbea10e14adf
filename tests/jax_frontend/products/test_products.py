"""Which form the products multiply, and that folded ones are the ops composed, to the byte."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.core_kernels.formats import WEIGHT_HEADROOM, spans
from mxep.jax_frontend import MXArray, Recipe, grouped_mm, lower_for, ops
from mxep.jax_frontend.products.weights import format_of

from ..references import kernels, normal

M, K, N, SIZES = 192, 64, 96, [64, 0, 96]
ENDS = jnp.asarray(np.cumsum(SIZES), jnp.int32)
LHS, RHS_T, DOUT = normal(M, K), normal(len(SIZES), N, K, seed=1), normal(M, N, seed=2)
whole_blocks = partial(grouped_mm, pad_token_groups=False)
MX = ["mxfp8_wgrad_with_hp", "mxfp8"]


def results(recipe: Recipe, lhs: jax.Array, rhs_t: jax.Array, dout: jax.Array, mx: bool = False):
    """out, in dout's dtype, dlhs and drhs_t, compiled."""

    def multiply(lhs, rhs_t):
        lhs = MXArray.quantize(lhs, recipe.rounding) if mx else lhs
        return whole_blocks(lhs, rhs_t, ENDS, recipe=recipe, out_dtype=dout.dtype)

    out, backward = jax.vjp(jax.jit(multiply), lhs, rhs_t)
    return out, *backward(dout)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize("name", MX)
def test_folded_products_are_the_ops_composed(name: str, mx: bool, rounding: str) -> None:
    def rows(x, headroom=0):
        return ops.fold_rows(*ops.quantize_row(x, rounding=rounding), headroom=headroom)

    def columns(x):
        return ops.quantize_col(x, rounding=rounding)

    out = ops.grouped_mm_fold(*rows(LHS), *rows(RHS_T, WEIGHT_HEADROOM), ENDS)
    weights = ops.fold_rows(*columns(RHS_T), headroom=WEIGHT_HEADROOM)
    dlhs = ops.grouped_mm_fold(*rows(DOUT), *weights, ENDS)
    lhs = MXArray.quantize(LHS, rounding).dequantize() if mx else LHS
    if name == "mxfp8":
        drhs = ops.grouped_wgrad_fold(*(x for t in (DOUT, lhs) for x in ops.fold_groups(*columns(t), ENDS)), ENDS)
    else:
        drhs = ops.grouped_wgrad_bf16(DOUT, lhs, ENDS)
    got = results(Recipe.parse(name, compute="fold", rounding=rounding), LHS, RHS_T, DOUT, mx)
    for g, w in zip(got, (out, dlhs, drhs), strict=True):
        np.testing.assert_array_equal(g, w)


def test_folding_reads_an_activation_once() -> None:
    """For both of its operands; without a gradient the product makes one."""
    recipe = Recipe.parse("mxfp8", compute="fold")

    def multiply(lhs, rhs_t):
        return whole_blocks(lhs, rhs_t, ENDS, recipe=recipe)

    assert kernels(lambda lhs, rhs_t, dout: jax.vjp(multiply, lhs, rhs_t)[1](dout), LHS, RHS_T, DOUT) == {
        "quantize_both_fold": 2, "quantize_matrix_fold": 1, "grouped_mm_fold": 2, "grouped_wgrad_fold": 1,
    }  # fmt: skip
    assert kernels(multiply, LHS, RHS_T) == {"quantize_row_fold": 2, "grouped_mm_fold": 1}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_saved_is_codes_of_tokens_and_of_the_transposed_weights(dtype: str) -> None:
    recipe = Recipe.parse("mxfp8", compute="fold")
    _, backward = jax.vjp(lambda *a: whole_blocks(*a, ENDS, recipe=recipe), LHS.astype(dtype), RHS_T)
    saved = [(a.dtype.name, a.shape) for a in jax.tree.leaves(backward)]
    tokens = [("uint8", (K, M)), ("uint8", (spans(M, len(SIZES)), K))]
    weights = [("uint8", (len(SIZES), K, N)), ("uint8", (len(SIZES), K))]
    assert sorted(saved) == sorted([*tokens, *weights, ("int32", ENDS.shape)])


@pytest.mark.parametrize("shape", [(N,), (3, N)])
def test_a_bias_is_added_by_the_product(shape: tuple[int, ...]) -> None:
    recipe, bias = Recipe.parse("mxfp8", compute="fold"), normal(*shape, seed=3)

    def multiply(lhs, rhs_t, bias):
        return whole_blocks(lhs, rhs_t, ENDS, bias=bias, recipe=recipe)

    assert kernels(multiply, LHS, RHS_T, bias) == {"quantize_row_fold": 2, "grouped_mm_fold_bias": 1}
    operands = *ops.quantize_row_fold(LHS), *ops.quantize_row_fold(RHS_T, headroom=WEIGHT_HEADROOM)
    per_group = jnp.broadcast_to(bias.astype(jnp.float32), (3, N))
    np.testing.assert_array_equal(multiply(LHS, RHS_T, bias), ops.grouped_mm_fold_bias(*operands, per_group, ENDS))


@pytest.mark.parametrize("name", MX)
def test_on_a_cpu_auto_is_exact(name: str) -> None:
    def multiply(recipe):
        return lambda lhs, rhs_t, dout: jax.vjp(lambda *a: whole_blocks(*a, ENDS, recipe=recipe), lhs, rhs_t)[1](dout)

    auto, exact, fold = (Recipe.parse(name, compute=compute) for compute in ("auto", "exact", "fold"))
    found = kernels(multiply(auto), LHS, RHS_T, DOUT)
    assert found == kernels(multiply(exact), LHS, RHS_T, DOUT)
    assert not [op for op in found if "fold" in op]
    assert not [op for op in kernels(multiply(fold), LHS, RHS_T, DOUT) if op in ("grouped_mm_mx", "grouped_wgrad_mx")]
    pairs = ops.quantize_row(LHS), ops.quantize_row(RHS_T)
    np.testing.assert_array_equal(results(auto, LHS, RHS_T, DOUT)[0], ops.grouped_mm_mx(*pairs[0], *pairs[1], ENDS))


@pytest.mark.parametrize("name", MX)
def test_exact_products_on_hopper_multiply_dequantized_operands(name: str) -> None:
    """Run on this machine's CPU, though traced for Hopper."""
    recipe = Recipe.parse(name, compute="exact")

    def rows(x):
        return ops.dequantize(*ops.quantize_row(x))

    def columns(x):
        return ops.dequantize(*ops.quantize_col(x))

    with lower_for("sm_90"):
        got = results(recipe, LHS, RHS_T, DOUT)
        found = kernels(lambda *arrays: results(recipe, *arrays), LHS, RHS_T, DOUT)
    assert not [op for op in found if op in ("grouped_mm_mx", "grouped_wgrad_mx")]
    hp = name == "mxfp8_wgrad_with_hp"
    want = (
        ops.grouped_mm_bf16(rows(LHS), rows(RHS_T), ENDS),
        ops.grouped_mm_bf16(rows(DOUT), columns(RHS_T), ENDS),
        ops.grouped_wgrad_bf16(DOUT, LHS, ENDS) if hp else ops.grouped_wgrad_bf16_t(columns(DOUT), columns(LHS), ENDS),
    )
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize(
    ("capability", "form"),
    [("8.0", "mx"), ("8.9", "mx"), ("9.0", "fold"), ("10.0", "mx"), ("10.3", "mx"), ("11.0", "mx"), ("12.0", "mx")],
)
def test_auto_folds_on_hopper_alone(capability: str, form: str) -> None:
    gpu = SimpleNamespace(compute_capability=capability)
    with (
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(jax, "devices", return_value=[gpu]),
    ):
        assert format_of(Recipe.parse("mxfp8")).name == form
        assert format_of(Recipe.parse("mxfp8", compute="exact")).name == "mx"
        assert format_of(Recipe.parse("bf16")).name == "bf16"


def test_a_backward_multiplies_what_its_forward_did() -> None:
    """Run on this machine's CPU, though traced for Hopper; the backward is traced outside of the block."""
    with lower_for("sm_90"):
        out, backward = jax.vjp(lambda *a: whole_blocks(*a, ENDS), LHS, RHS_T)
    want = results(Recipe.parse("mxfp8", compute="fold"), LHS, RHS_T, DOUT)
    for g, w in zip((out, *backward(DOUT)), want, strict=True):
        np.testing.assert_array_equal(g, w)
