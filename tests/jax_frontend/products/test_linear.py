"""The dense product: bytes of the grouped product of one group, programs, and what it refuses."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.jax_frontend import MXArray, Recipe, dense, export_checks, grouped_mm, quantize_weights

from ..references import normal

K, N = 64, 96
FOLD = Recipe.parse("mxfp8", compute="fold")
RUNS = {"mxfp8": Recipe.parse("mxfp8", compute="exact"), "fold": FOLD, "rowwise": Recipe.parse("fp8_rowwise")}
W, BIAS = normal(K, N, seed=1), normal(N, seed=2)


def gradients(function: Any, dout: jax.Array, *args: jax.Array) -> tuple[jax.Array, ...]:
    out, backward = jax.vjp(jax.jit(function), *args)
    return out, *backward(dout)


@pytest.mark.parametrize(("run", "rows"), [("fold", 0), ("fold", 1), ("fold", 33), ("mxfp8", 33), ("rowwise", 33)])
def test_one_group_of_the_grouped_product(run: str, rows: int) -> None:
    x, dout, recipe = normal(rows, K), normal(rows, N, seed=3), RUNS[run]
    got = gradients(partial(dense, recipe=recipe), dout, x, W, BIAS)

    def grouped(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return grouped_mm(x, w.T[None], jnp.array([rows]), bias=bias, recipe=recipe)

    want = gradients(grouped, dout, x, W, BIAS)
    for g, h in zip(got[:3], want[:3], strict=True):
        np.testing.assert_array_equal(g, h)
    np.testing.assert_allclose(got[3].astype("float32"), dout.astype("float32").sum(0), rtol=2**-8, atol=1e-2)


def test_leading_dims_and_the_dtype_of_the_result() -> None:
    x, out = normal(6, 11, K), None
    for dtype in ("bfloat16", "float32"):
        out = dense(x.astype(dtype), W, BIAS, recipe=FOLD)
        assert (out.shape, out.dtype) == ((6, 11, N), dtype)
        np.testing.assert_array_equal(out.reshape(66, N), dense(x.astype(dtype).reshape(66, K), W, BIAS, recipe=FOLD))
    assert dense(x, W, recipe=FOLD, out_dtype="float32").dtype == jnp.float32
    dx, dw = jax.grad(lambda x, w: dense(x, w, recipe=FOLD, out_dtype="float32").sum(), (0, 1))(x, W)
    assert (dx.dtype, dw.dtype) == (x.dtype, W.dtype)


def test_quantized_weights_have_the_same_bytes() -> None:
    x, dout = normal(64, K), normal(64, N, seed=3)
    quantized = quantize_weights(W[None], FOLD)
    got = gradients(lambda x, w: dense(x, quantized.with_values(w[None]), recipe=FOLD), dout, x, W)
    for g, h in zip(got, gradients(lambda x, w: dense(x, w, recipe=FOLD), dout, x, W), strict=True):
        np.testing.assert_array_equal(g, h)


def calls(compiled: Any) -> dict[str, int]:
    """The custom calls of a compiled program by the name of the op."""
    found: dict[str, int] = {}
    for name in ("quantize_both_fold", "quantize_matrix_fold", "quantize_row_fold"):
        found[name] = sum(f'custom_call_target="mxep.{name}"' in line for line in compiled.as_text().splitlines())
    return found


def test_layers_of_a_program_share_the_operands_of_their_rows() -> None:
    x, weights = normal(64, K), [normal(K, N, seed=seed) for seed in (4, 5, 6)]

    def loss(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        return sum(jnp.sin(dense(x, w, recipe=FOLD, out_dtype="float32")).sum() for w in weights)  # type: ignore[return-value]

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, weights).compile()
    assert calls(compiled)["quantize_both_fold"] == 1 + len(weights)  # of x, and of the gradient of each
    assert calls(compiled)["quantize_matrix_fold"] == len(weights)


@pytest.mark.parametrize("rows", [33, 64])
def test_a_program_without_gradients_quantizes_rows_alone_and_copies_nothing(rows: int) -> None:
    compiled = jax.jit(partial(dense, recipe=FOLD)).lower(normal(rows, K), W).compile()
    found = calls(compiled)
    assert (found["quantize_both_fold"], found["quantize_matrix_fold"]) == (0, 0)
    assert not [line for line in compiled.as_text().splitlines() if "bf16[64,64]{1,0} pad" in line]


def test_rows_as_a_symbol_of_jax_export() -> None:
    (rows,) = jax.export.symbolic_shape("rows")
    args = jax.ShapeDtypeStruct((rows, K), jnp.bfloat16), jax.ShapeDtypeStruct(W.shape, W.dtype)

    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(partial(dense, recipe=FOLD), x, w)
        return out, *backward(jnp.ones_like(out))

    exported = jax.export.export(jax.jit(step), disabled_checks=export_checks())(*args)
    x = normal(33, K)
    for g, h in zip(exported.call(x, W), jax.jit(step)(x, W), strict=True):
        np.testing.assert_array_equal(g, h)


X = normal(33, K)
BAD = {
    "a width": (ValueError, r"dense: x: got shape \(33, 32\); allowed: \(\.\.\., 64\)", (X[:, :32], W)),
    "half": (TypeError, r"dense: x: got dtype float16", (X.astype("float16"), W)),
    "half weights": (TypeError, r"dense: w: got dtype float16", (X, W.astype("float16"))),
    "MX rows": (TypeError, r"dense: x: got MXArray", (MXArray.quantize(X), W)),
    "groups": (ValueError, r"dense: w: got shape \(1, 64, 96\); allowed: \(K, N\)", (X, W[None])),
    "many groups": (ValueError, r"QuantizedWeights \(2, 64, 96\)", (X, quantize_weights(jnp.stack([W, W])))),
    "K": (ValueError, r"dense: w: got K = 40; allowed: positive multiples of 32", (X[:, :40], W[:40])),
    "N": (ValueError, r"dense: w: got N = 40", (X, W[:, :40])),
    "bias": (ValueError, r"dense: bias: got shape \(64,\); allowed: \(96,\)", (X, W, BIAS[:64])),
    "half bias": (TypeError, r"dense: bias: got dtype float16", (X, W, BIAS.astype("float16"))),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    error, message, args = BAD[name]
    with pytest.raises(error, match=message):
        dense(*args)


def test_bad_options_and_transforms() -> None:
    with pytest.raises(ValueError, match=r"dense: recipe: got 'fp4'"):
        dense(X, W, recipe="fp4")
    with pytest.raises(TypeError, match=r"dense: out_dtype: got float16"):
        dense(X, W, out_dtype="float16")
    with pytest.raises(NotImplementedError, match=r"dense: transform: got jax\.vmap"):
        jax.vmap(dense, (0, None))(normal(2, 33, K), W)
