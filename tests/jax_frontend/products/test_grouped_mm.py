"""The grouped product: its gradients, bias, padding of groups, and what it refuses."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.core_kernels.policy.recipe import Compute
from mxep.jax_frontend import RECIPES, MXArray, Recipe, grouped_mm, ops
from mxep.jax_frontend.exchange.all_to_all import plan_exchange
from mxep.jax_frontend.exchange.rows import permute
from mxep.jax_frontend.integrations.torchao import a2a_combine_hp_fwd_mxfp8_bwd
from mxep.jax_frontend.ops.mx_array import MXGradArray

from ..references import normal

M, K, N, SIZES = 192, 64, 96, [64, 0, 96]
ENDS = jnp.asarray(np.cumsum(SIZES), jnp.int32)
X, W, DOUT = normal(M, K), normal(len(SIZES), N, K, seed=1), normal(M, N, seed=2)
HALF = X.astype("float16")


@pytest.mark.parametrize("recipe", RECIPES)
def test_x_in_fp32_has_the_bytes_of_the_same_values_in_bf16(recipe: str) -> None:
    """And its gradient is rounded no more. The bytes themselves: tests/conformance/layer/test_end_to_end.py."""

    def step(x: jax.Array) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(jax.jit(partial(grouped_mm, group_ends=ENDS, recipe=recipe)), x, W)
        return out, *backward(DOUT)

    (out, dx, dw), (wide_out, wide_dx, wide_dw) = step(X), step(X.astype("float32"))
    for got, want in ((wide_out, out), (wide_dx.astype(jnp.bfloat16), dx), (wide_dw, dw)):
        np.testing.assert_array_equal(got, want)
    assert (out.dtype, wide_dx.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32, X.dtype, W.dtype)
    assert not np.asarray(dw[1], np.float32).any(), "an empty group"
    assert not np.asarray(dx[sum(SIZES) :], np.float32).any(), "rows past the last group"


@pytest.mark.parametrize(
    ("name", "compute", "per_group", "out_dtype"),
    [
        ("mxfp8_wgrad_with_hp", "exact", True, "bfloat16"),
        ("mxfp8", "fold", True, "bfloat16"),
        ("mxfp8", "fold", False, "float32"),
        ("fp8_rowwise", "exact", True, "bfloat16"),
        ("bf16", "exact", False, "float32"),
    ],
)
def test_a_bias_and_its_gradient(name: str, compute: Compute, per_group: bool, out_dtype: str) -> None:
    """Added once in fp32, to the rows of groups alone; no other gradient sees it."""
    recipe = Recipe.parse(name, compute=compute)
    bias = normal(*((3, N) if per_group else (N,)), seed=3, dtype="float32")
    dout = jnp.where(jnp.arange(M)[:, None] < ENDS[-1], DOUT, jnp.nan).astype(out_dtype)
    dout = dout * (1 + 2.0**-12) if out_dtype == "float32" else dout  # more bits than bf16 has

    @partial(jax.jit, static_argnames="out_dtype")
    def multiply(x, w, bias, out_dtype):
        return grouped_mm(x, w, ENDS, bias=bias, recipe=recipe, out_dtype=out_dtype)

    out, backward = jax.vjp(partial(multiply, out_dtype=out_dtype), X, W, bias)
    group = np.searchsorted(ENDS, np.arange(M), side="right")
    rows = np.pad(np.broadcast_to(bias, (3, N)), ((0, 1), (0, 0)))[group]
    want = (multiply(X, W, None, "float32") + rows).astype(out_dtype)
    np.testing.assert_array_equal(out, want)
    dx, dw, dbias = backward(dout)
    without, backward = jax.vjp(lambda *a: multiply(*a, None, out_dtype), X, W)
    for got, want in zip((dx, dw), backward(dout), strict=True):
        np.testing.assert_array_equal(got, want)
    values = np.asarray(dout, np.float64)
    sums, magnitudes = (np.stack([x[group == g].sum(0) for g in range(3)]) for x in (values, np.abs(values)))
    if not per_group:
        sums, magnitudes = sums.sum(0), magnitudes.sum(0)
    # A product with ones: fp32 sums of M terms, of which two bf16 parts leave out 2^-17.
    assert (np.abs(dbias - sums) <= (2.0**-17 + M * 2.0**-23) * magnitudes).all()
    assert (without.dtype, dbias.dtype) == (out.dtype, bias.dtype)


def test_a_bias_receives_the_bytes_that_the_product_does() -> None:
    exchange = plan_exchange(jnp.array([M], jnp.int32), None, num_rows=M)
    ends, bias = jnp.array([33, 33, 128], jnp.int32), normal(3, N, seed=3)

    def loss(bias, mx_grad: bool):
        out = grouped_mm(X, W, ends, bias=bias, mx_grad=mx_grad, pad_token_groups=True)
        sent = a2a_combine_hp_fwd_mxfp8_bwd(out, exchange) if mx_grad else out
        return (sent * DOUT).astype(jnp.float32).sum()

    values = np.asarray(MXArray.quantize(DOUT).dequantize(), np.float32), np.asarray(DOUT, np.float32)
    for mx_grad, dout in zip((True, False), values, strict=True):
        sums = np.stack([dout[:33].sum(0), np.zeros(N), dout[33:128].sum(0)])
        got = jax.jit(jax.grad(loss), static_argnums=1)(bias, mx_grad)
        np.testing.assert_array_equal(got, sums.astype(got.dtype))


def test_inside_jit_a_promise_of_whole_blocks_that_is_not_kept_gives_nan() -> None:
    """Where an end cuts a block: the groups on both of its sides. An op that folds refuses on a CPU, when it runs."""

    @partial(jax.jit, static_argnums=1)
    def gradient(ends, compute):
        recipe = Recipe.parse("mxfp8", compute=compute)
        run = partial(grouped_mm, X, group_ends=ends, recipe=recipe, pad_token_groups=False)
        return jax.vjp(lambda w: run(w), W)[1](DOUT)[0]

    cut = np.isnan(gradient(jnp.array([32, 96, 100]), "exact")).all((1, 2))
    assert cut.tolist() == [False, False, True]
    cut = gradient(jnp.array([20, 96, 192]), "exact")
    assert np.isnan(cut).all((1, 2)).tolist() == np.isnan(cut).any((1, 2)).tolist() == [True, True, False]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"got 20 at index 0; allowed: .*multiples of 32"):
        gradient(jnp.array([20, 96, 192]), "fold").block_until_ready()


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8"])
@pytest.mark.parametrize("mx", [False, True])
def test_padding_groups_is_what_the_caller_would_do(recipe: str, mx: bool) -> None:
    sizes = [33, 0, 95]

    def padded_here(x, w):
        x = MXArray.quantize(x) if mx else x
        return grouped_mm(x, w, jnp.cumsum(jnp.array(sizes)), recipe=recipe)

    def padded_by_hand(x, w):
        rows = [jnp.zeros((n, K), x.dtype) for n in (31, 32, 1)]
        x = jnp.concatenate([x[:33], rows[0], rows[1], x[33:128], rows[2]])
        x = MXArray.quantize(x) if mx else x
        out = grouped_mm(x, w, jnp.array([64, 96, 192], jnp.int32), recipe=recipe)
        return jnp.concatenate([out[:33], out[96:191], jnp.zeros((M - 128, N), out.dtype)])

    results = [jax.vjp(jax.jit(f), X, W) for f in (padded_here, padded_by_hand)]
    (here, there), (dhere, dthere) = zip(*((out, backward(DOUT)) for out, backward in results), strict=True)
    np.testing.assert_array_equal(here, there)
    for a, b in zip(dhere, dthere, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_ends_of_another_integer_dtype(dtype: str, jit: bool) -> None:
    """More rows than a byte counts, all of whose ends a byte holds."""
    x, ends = normal(300, K), np.array([100, 160, 250])
    for recipe in ("mxfp8", "bf16"):
        product = partial(grouped_mm, recipe=recipe)
        found = (jax.jit(product) if jit else product)(x, W, jnp.asarray(ends, dtype))
        np.testing.assert_array_equal(found, product(x, W, jnp.asarray(ends)))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grouped_mm(X, W, ENDS[:2]), ValueError, r"group_ends: got shape \(2,\); allowed: \(3,\)"),
        (lambda: grouped_mm(X, W, ENDS, recipe="fp4"), ValueError, "recipe: got 'fp4'"),
        (
            lambda: grouped_mm(X, W, ENDS, recipe=Recipe("", mxfp8_all_to_all=())),
            NotImplementedError,
            r"recipe: got mxfp8_all_to_all \(\)",
        ),
        (lambda: grouped_mm(X, W[0], ENDS), ValueError, r"\(G, N, K\)"),
        (lambda: grouped_mm(X, W[:, :33], ENDS), ValueError, "w: got dim 1, N, = 33"),
        (lambda: grouped_mm(X[:, :32], W, ENDS), ValueError, "x, w: got shapes .*; allowed: .* with the same K"),
        (lambda: grouped_mm(X[:, :33], W[:, :, :33], ENDS), ValueError, "w: got dim 2, K, = 33"),
        (
            lambda: grouped_mm(X, W, jnp.array([64, 32, 192], jnp.uint32)),
            ValueError,
            "group_ends: got .*; allowed: .* that do not decrease",
        ),
        (
            lambda: grouped_mm(X[:33], W, ENDS, recipe="mxfp8", pad_token_groups=False),
            ValueError,
            "x: got rows = 33",
        ),
        (
            lambda: grouped_mm(X, W, jnp.array([64, 32, 96], jnp.int32)),
            ValueError,
            "decrease.*counts go to group_sizes=",
        ),
        (lambda: grouped_mm(X, W), ValueError, "group_ends, group_sizes: got none; allowed: one of them"),
        (
            lambda: grouped_mm(X, W, ENDS, group_sizes=ENDS),
            ValueError,
            "group_ends, group_sizes: got both; allowed: one",
        ),
        (
            lambda: grouped_mm(X, W, group_sizes=ENDS[:2]),
            ValueError,
            r"group_sizes: got shape \(2,\); allowed: \(3,\), one",
        ),
        (lambda: grouped_mm(X, W, group_sizes=jnp.ones(3)), TypeError, "group_sizes: got dtype float32"),
        (lambda: grouped_mm(X, W, group_sizes=ENDS), ValueError, "group_sizes: .* sum to at most 192"),
        (lambda: grouped_mm(X, W, group_sizes=ENDS - 96), ValueError, "group_sizes: .* at least 0"),
        (lambda: grouped_mm(X, W, jnp.array([64, 96, 193], jnp.int32)), ValueError, "at most 192"),
        (
            lambda: grouped_mm(X, W, ENDS - 1, recipe="mxfp8", pad_token_groups=False),
            ValueError,
            "multiples of 32",
        ),
        (lambda: grouped_mm(X, W, ENDS, bias=ENDS), TypeError, "bias: got dtype int32"),
        (
            lambda: grouped_mm(X, W, ENDS, bias=X[0]),
            ValueError,
            r"bias: got shape \(64,\); allowed: \(96,\)",
        ),
        (lambda: grouped_mm(HALF, W, ENDS, recipe="bf16"), TypeError, "x: got dtype float16"),
        (lambda: grouped_mm(X.astype(int), W, ENDS, recipe="bf16"), TypeError, "x: got dtype int32"),
        (lambda: grouped_mm(X, W.astype("float16"), ENDS, recipe="bf16"), TypeError, "w: got dtype"),
        (lambda: grouped_mm(MXGradArray.wrap(X), W, ENDS), TypeError, "x: got MXGradArray"),
        (lambda: grouped_mm(X, W, jnp.ones(3)), TypeError, "group_ends: got dtype float32"),
    ],
)
def test_a_bad_argument_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32", "numpy"])
def test_counts_of_groups_in_place_of_ends(dtype: str) -> None:
    """Of any integer dtype, eagerly and traced. NumPy counts in int64."""
    sizes = np.array(SIZES) if dtype == "numpy" else jnp.array(SIZES, dtype)
    want = grouped_mm(X, W, ENDS)
    np.testing.assert_array_equal(grouped_mm(X, W, group_sizes=sizes), want)
    np.testing.assert_array_equal(jax.jit(lambda sizes: grouped_mm(X, W, group_sizes=sizes))(sizes), want)


def test_counts_that_an_int32_does_not_hold_are_no_smaller_counts() -> None:
    for sizes in (jnp.array([64, 2**32 - 1, 96], jnp.uint32), np.array([64, 2**31, 96]), np.array([64, 2**32, 96])):
        with pytest.raises(ValueError, match=r"group_sizes: .* sum to at most 192"):
            grouped_mm(X, W, group_sizes=sizes)


def test_an_eager_call_with_counts_for_ends_is_warned_of() -> None:
    """Most rows are past the last end. The RowMap of a padded buffer has such ends too, and no call is a mistake."""
    counts = jnp.array([10, 20, 30], jnp.int32)
    text = r"grouped_mm: group_ends: the last end is 30 of 192 rows, .* counts go to group_sizes="
    with pytest.warns(UserWarning, match=text) as found:
        grouped_mm(X, W, counts)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda ends: grouped_mm(X, W, ends))(counts)
        grouped_mm(X, W, jnp.array([0, 0, M // 2]))
        grouped_mm(X[:0], W, jnp.zeros(3, jnp.int32))
        grouped_mm(X, W, group_sizes=counts)
        rows, maps = permute(X, jnp.array([1, 1, 1]))
        grouped_mm(rows, W, maps)


def test_checkify_finds_a_bad_value_inside_jit() -> None:
    from jax.experimental import checkify

    def loss(x, ends):
        return grouped_mm(x, W, ends).astype(jnp.float32).sum()

    checked = checkify.checkify(jax.jit(jax.grad(loss)))
    error, _ = checked(X, ENDS[::-1])
    with pytest.raises(checkify.JaxRuntimeError, match="do not decrease"):
        error.throw()
    assert checked(X, ENDS)[0].get() is None


def test_a_recipe_with_other_choices_is_used() -> None:
    floor = Recipe.parse("mxfp8_wgrad_with_hp", rounding="floor")
    got = grouped_mm(X, W, ENDS, recipe=floor)
    pairs = ops.quantize_row(X, rounding="floor"), ops.quantize_row(W, rounding="floor")
    np.testing.assert_array_equal(got, ops.grouped_mm_mx(*pairs[0], *pairs[1], ENDS))
    assert not np.array_equal(got, grouped_mm(X, W, ENDS))
