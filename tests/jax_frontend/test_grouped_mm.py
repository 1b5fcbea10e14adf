"""Gradients of permute, grouped GEMM and un-permute, and of the arrays that carry them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.core_kernels.recipe import Compute
from mxep.jax_frontend import (
    MXArray,
    MXGradArray,
    Recipe,
    a2a_combine_hp_fwd_mxfp8_bwd,
    gather_rows,
    grouped_mm,
    ops,
    permute,
    permute_mxfp8_fwd_hp_bwd,
    plan_exchange,
    spread_rows,
    unpermute_hp_fwd_mxfp8_bwd,
)

from ..compare import sqnr_db
from . import references
from .references import normal

M, K, N, SIZES = 192, 64, 96, [64, 0, 96]
ENDS = jnp.asarray(np.cumsum(SIZES), jnp.int32)
X, W, DOUT = normal(M, K), normal(len(SIZES), N, K, seed=1), normal(M, N, seed=2)
HALF = X.astype("float16")

# Measured 28.36 to 28.55 dB of MXFP8 and 55.5 and more of bf16, less 0.25; 31.5 of a weight gradient whose one operand
# arrived quantized.
MX_DB, BF16_DB, HALF_MX_DB = 28.1, 55.25, 31.2
THRESHOLDS = {
    "mxfp8_wgrad_with_hp": (MX_DB, MX_DB, BF16_DB),
    "mxfp8": (MX_DB, MX_DB, MX_DB),
    "fp8_rowwise": (MX_DB, MX_DB, BF16_DB),
    "bf16": (BF16_DB, BF16_DB, BF16_DB),
}
MX_ROWS = {
    "mxfp8_wgrad_with_hp": (MX_DB, MX_DB, HALF_MX_DB),
    "fp8_rowwise": (MX_DB, MX_DB, HALF_MX_DB),
    "bf16": (31.1, BF16_DB, HALF_MX_DB),
}
"""Of x that arrives quantized; bf16 measured 31.4, 55.6 and 31.5."""


@pytest.mark.parametrize("x_kind", ["bfloat16", "float32", "mx"])
@pytest.mark.parametrize("recipe", THRESHOLDS)
def test_the_grouped_product_and_its_gradients_are_those_of_floats(recipe: str, x_kind: str) -> None:
    def quantized(x, w):
        x = MXArray.quantize(x) if x_kind == "mx" else x
        return grouped_mm(x, w, ENDS, recipe=recipe)

    x = X.astype("float32" if x_kind == "float32" else "bfloat16")
    out, backward = jax.vjp(jax.jit(quantized), x, W)
    dx, dw = backward(DOUT)
    floats = (x.astype(jnp.float32) for x in (X, W))
    expected, backward = jax.vjp(lambda x, w: references.grouped_mm(x, w, SIZES), *floats)
    expected = (expected, *backward(DOUT.astype(jnp.float32)))
    limits = (THRESHOLDS | MX_ROWS)[recipe] if x_kind == "mx" else THRESHOLDS[recipe]
    for got, want, limit in zip((out, dx, dw), expected, limits, strict=True):
        assert sqnr_db(got, want) > limit
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, x.dtype, W.dtype)
    assert not np.asarray(dw[1], np.float32).any(), "an empty group"
    assert not np.asarray(dx[sum(SIZES) :], np.float32).any(), "rows past the last group"


@pytest.mark.parametrize(("per_group", "out_dtype"), [(True, "bfloat16"), (False, "float32")])
@pytest.mark.parametrize(
    ("name", "compute"),
    [("mxfp8_wgrad_with_hp", "exact"), ("mxfp8", "fold"), ("fp8_rowwise", "exact"), ("bf16", "exact")],
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


def to_experts_and_back(x, w, mx_grad: bool, **options):
    """permute -> grouped product -> un-permute -> combine, on one rank with unaligned counts."""
    counts = jnp.array([41, 0, 87], jnp.int32)
    exchange = plan_exchange(counts, None, num_rows=x.shape[0])
    groups, maps = permute(x, exchange.recv_counts, 1, 3)
    out = grouped_mm(groups, w, maps.group_ends, recipe="mxfp8_wgrad_with_hp", mx_grad=mx_grad)
    return a2a_combine_hp_fwd_mxfp8_bwd(unpermute_hp_fwd_mxfp8_bwd(out, maps), exchange, **options)


def test_an_mx_gradient_reaches_the_product_as_the_bytes_that_were_sent() -> None:
    """The input gradient quantizes its operand along the rows, and permuting and quantizing rows commute: bytes that
    arrive as MXFP8 and floats that are quantized on arrival give the same bits."""
    x, dy = normal(128, K, seed=3), normal(128, N, seed=4)

    def gradients(mx_grad: bool, mxfp8_bwd: bool):
        y, backward = jax.vjp(partial(to_experts_and_back, mx_grad=mx_grad, mxfp8_bwd=mxfp8_bwd), x, W)
        return y, *backward(dy)

    y, dx, dw = jax.jit(partial(gradients, True, True))()
    for mx_grad, mxfp8_bwd in ((False, False), (True, False), (False, True)):
        same = jax.jit(partial(gradients, mx_grad, mxfp8_bwd))()
        np.testing.assert_array_equal(same[0], y)
        np.testing.assert_array_equal(same[1], dx)
        # bf16 weight gradients see what the wire carried: floats, or what MXFP8 kept of them
        assert np.array_equal(same[2], dw) == mxfp8_bwd


@pytest.mark.parametrize("wrapped", [jax.jit, jax.checkpoint, lambda f: jax.checkpoint(jax.jit(f)), "scan"])
def test_jit_remat_and_scan_do_not_change_a_gradient(wrapped) -> None:
    x, dy = normal(128, K, seed=3), normal(128, N, seed=4)
    layer = partial(to_experts_and_back, mx_grad=True)

    def loss(layer, x, w):
        return (layer(x, w) * dy).astype(jnp.float32).sum()

    def scanned(x, w):
        return jax.lax.scan(lambda carry, _: (carry + layer(x, w), None), jnp.zeros_like(dy), length=1)[0]

    other = scanned if wrapped == "scan" else wrapped(layer)
    expected = jax.grad(partial(loss, layer), argnums=(0, 1))(x, W)
    got = jax.jit(jax.grad(partial(loss, other), argnums=(0, 1)))(x, W)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_value_read_besides_adds_its_gradient() -> None:
    """out.value has a gradient of its own: it is added to the one that comes as bytes, not lost."""
    exchange = plan_exchange(jnp.array([M], jnp.int32), None, num_rows=M)

    def two_readers(x, dy, weight):
        out = grouped_mm(x, W, ENDS, mx_grad=True)
        sent = a2a_combine_hp_fwd_mxfp8_bwd(out, exchange) * dy
        return sent.astype(jnp.float32).sum() + weight * out.value.astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(two_readers))
    # 1 and 2 are representable whatever the block's scale: nothing is rounded on the way
    ones = jnp.ones_like(DOUT)
    np.testing.assert_array_equal(gradient(X, ones, 1.0), gradient(X, 2 * ones, 0.0))
    assert np.asarray(gradient(X, ones, 1.0), np.float32).any()


def test_bytes_have_one_reader() -> None:
    out = MXGradArray.wrap(normal(M, N))
    exchange = plan_exchange(jnp.array([M], jnp.int32), None, num_rows=M)
    a2a_combine_hp_fwd_mxfp8_bwd(out, exchange)
    with pytest.raises(ValueError, match="already used"):
        a2a_combine_hp_fwd_mxfp8_bwd(out, exchange)


ONE_RANK = plan_exchange(jnp.array([M], jnp.int32), None, num_rows=M)


def read(out: MXGradArray, factor: float) -> jax.Array:
    """Twice through jit, which hides from the second reader that there was a first."""
    sent = jax.jit(lambda o: a2a_combine_hp_fwd_mxfp8_bwd(o, ONE_RANK))(out)
    return (factor * sent.astype(jnp.float32)).sum()


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "mxfp8"])
@pytest.mark.parametrize("unpermuted", [False, True])
@pytest.mark.parametrize("factors", [(1, -0.5), (1, -1), (3, -2)])
def test_a_second_reader_that_no_one_saw_gives_nan(factors, unpermuted: bool, recipe: str) -> None:
    order = jnp.arange(M, dtype=jnp.int32)
    maps = ops.RowMap(order, order, jnp.array([M]), jnp.array([M]))

    def loss(x, w):
        out = grouped_mm(x, w, jnp.array([64, 64, M], jnp.int32), recipe=recipe, mx_grad=True)
        out = unpermute_hp_fwd_mxfp8_bwd(out, maps) if unpermuted else out
        return read(out, factors[0]) + read(out, factors[1])

    dx, dw = jax.grad(loss, argnums=(0, 1))(X, W)
    assert np.isnan(np.asarray(dx, np.float32)).all()
    assert np.isnan(np.asarray(dw[jnp.array([0, 2])], np.float32)).all()


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_scan_counts_its_readers(length: int) -> None:
    """A loop's cotangents start as zeros in memory: none, one and two readers are told apart as it runs."""

    def scanned(x):
        out = grouped_mm(x, W, ENDS, mx_grad=True)
        return jax.lax.scan(lambda total, _: (total + read(out, 2.0), None), jnp.zeros(()), length=length)[0]

    got = np.asarray(jax.grad(scanned)(X), np.float32)
    once = jax.grad(lambda x: read(grouped_mm(x, W, ENDS, mx_grad=True), 2.0))(X)
    expected = {0: np.zeros_like(got), 1: np.asarray(once, np.float32)}
    if length in expected:
        np.testing.assert_array_equal(got, expected[length])
    else:
        assert np.isnan(got[: sum(SIZES)]).all()


def test_a_branch_that_was_not_taken_did_not_read() -> None:
    def loss(x, which):
        out = grouped_mm(x, W, ENDS, mx_grad=True)
        return jax.lax.cond(which, lambda: read(out, 1.0), lambda: 0.0)

    for which in (True, False):
        expected = jax.grad(lambda x: read(grouped_mm(x, W, ENDS, mx_grad=True), 1.0))(X)
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(X, which), expected if which else 0 * expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_value_that_is_wrapped_anew_gets_its_gradient(compiled: bool) -> None:
    """Dequantized on the way: the bytes go to the new companions."""

    def loss(x, anew: bool):
        out = grouped_mm(x, W, ENDS, mx_grad=True)
        exchange = plan_exchange(jnp.array([M], jnp.int32), None, num_rows=M)
        sent = MXGradArray.wrap(out.value) if anew else out
        return (a2a_combine_hp_fwd_mxfp8_bwd(sent, exchange).astype(jnp.float32) * DOUT).sum()

    gradient = jax.grad(loss)
    gradient = jax.jit(gradient, static_argnums=1) if compiled else gradient
    assert np.array_equal(gradient(X, True), gradient(X, False))
    assert np.abs(gradient(X, True)).max() > 0


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


def test_permuting_moves_rows_and_gradients_through_one_map() -> None:
    rows, groups = normal(5, 64), normal(96, 64, seed=1)
    counts = jnp.array([1, 1, 2, 1], jnp.int32)  # two ranks of two experts
    mx = MXArray.quantize(rows)
    (moved, maps), backward = jax.vjp(lambda mx: permute_mxfp8_fwd_hp_bwd(mx, counts, 2, 2, rank_rows=0), mx)
    expected = np.zeros((96, 64), np.float32)
    expected[[0, 1, 2, 32, 33]] = np.asarray(mx.dequantize(), np.float32)[[0, 2, 3, 1, 4]]
    np.testing.assert_array_equal(moved.dequantize().astype(np.float32), expected)
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (moved.q, moved.sf, maps))
    (gradient,) = backward((MXArray(none[0], none[1], groups), none[2]))
    np.testing.assert_array_equal(gradient.carrier, groups[jnp.array([0, 32, 1, 2, 33])])
    assert (gradient.q.dtype, gradient.sf.dtype) == (jax.dtypes.float0, jax.dtypes.float0)

    out, backward = jax.vjp(lambda x: unpermute_hp_fwd_mxfp8_bwd(x, maps), groups)
    np.testing.assert_array_equal(out, gradient.carrier)
    np.testing.assert_array_equal(backward(mx.dequantize())[0].astype(np.float32), expected)


def test_a_tokens_gradient_is_the_sum_over_its_copies() -> None:
    order, inverse, _ = ops.sort_by_expert(jnp.array([2, 0, 1, 2, 0, 1], jnp.int32), 3)
    x, drows = normal(3, 64), normal(6, 64, seed=1)
    rows, backward = jax.vjp(lambda x: spread_rows(x, order, inverse, 2), x)
    np.testing.assert_array_equal(rows, x[order // 2])
    expected = jnp.zeros((3, 64)).at[order // 2].add(drows.astype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(backward(drows)[0], expected)
    back, backward = jax.vjp(lambda rows: gather_rows(rows, inverse, order), rows)
    np.testing.assert_array_equal(back, jnp.repeat(x, 2, 0))
    np.testing.assert_array_equal(backward(drows)[0], drows[order])


@pytest.mark.parametrize("mx", [False, True])
def test_copies_may_lie_in_padded_groups(mx: bool) -> None:
    x, drows = normal(3, 64), normal(8, 64, seed=1)
    order, inverse = jnp.array([4, -1, 0, 2, -1, 5, 1, 3], jnp.int32), jnp.array([2, 6, 3, 7, 0, 5], jnp.int32)

    def spread(x):
        x = MXArray.quantize(x) if mx else x
        rows = spread_rows(x, order, inverse, 2)
        return rows.dequantize() if mx else rows

    rows, backward = jax.vjp(jax.jit(spread), x)
    values = MXArray.quantize(x).dequantize() if mx else x
    np.testing.assert_array_equal(rows, jnp.where((order < 0)[:, None], 0, values[order // 2]))
    expected = drows.astype(jnp.float32)[inverse].reshape(3, 2, 64).sum(1).astype(jnp.bfloat16)
    np.testing.assert_array_equal(backward(drows)[0], expected)


def test_quantizing_and_dequantizing_pass_the_gradient() -> None:
    x, dy = normal(4, 64, dtype="float32"), normal(4, 64, seed=1, dtype="float32")
    y, backward = jax.vjp(lambda x: MXArray.quantize(x, "floor").dequantize(), x)
    q, sf = ops.quantize_row(x, rounding="floor")
    np.testing.assert_array_equal(y, ops.dequantize(q, sf, out_dtype="float32"))
    np.testing.assert_array_equal(backward(dy)[0], dy)
    mx = MXArray.quantize(x)
    np.testing.assert_array_equal(mx.packed(), ops.quantize_row_packed(x))
    assert (mx.shape, mx.dtype) == ((4, 64), jnp.float32)
    assert len(jax.tree.leaves(mx)) == 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: grouped_mm(X, W, ENDS[:2]), ValueError, r"group_ends: got shape \(2,\); allowed: \(3,\)"),
        (lambda: grouped_mm(X, W, ENDS, recipe="fp4"), ValueError, "recipe: got 'fp4'"),
        (lambda: grouped_mm(X, W[0], ENDS), ValueError, r"\(G, N, K\)"),
        (lambda: grouped_mm(X, W[:, :33], ENDS), ValueError, "w: got dim 1, N, = 33"),
        (
            lambda: grouped_mm(X[:33], W, ENDS, recipe="mxfp8", pad_token_groups=False),
            ValueError,
            "x: got rows = 33",
        ),
        (lambda: grouped_mm(X, W, jnp.array([64, 32, 96], jnp.int32)), ValueError, "do not decrease"),
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
        (lambda: permute(X, jnp.array([1, 2], jnp.int32), 1, 3), ValueError, "num_tokens_per_expert: got shape"),
        (lambda: permute(X, jnp.array([100, 100], jnp.int32), 1, 2), ValueError, "at most 192"),
        (lambda: permute(X, jnp.array([1, 2], jnp.int32), 1, 2, 33), ValueError, "alignment: got 33"),
        (lambda: grouped_mm(HALF, W, ENDS, recipe="bf16"), TypeError, "x: got dtype float16"),
        (lambda: grouped_mm(X.astype(int), W, ENDS, recipe="bf16"), TypeError, "x: got dtype int32"),
        (lambda: grouped_mm(X, W.astype("float16"), ENDS, recipe="bf16"), TypeError, "w: got dtype"),
        (lambda: grouped_mm(MXGradArray.wrap(X), W, ENDS), TypeError, "x: got MXGradArray"),
        (lambda: grouped_mm(X, W, jnp.ones(3)), TypeError, "group_ends: got dtype float32"),
        (lambda: permute(X, jnp.ones(2), 1, 2), TypeError, "num_tokens_per_expert: got dtype float32"),
        (lambda: permute(MXGradArray.wrap(X), ENDS, 1, 3), TypeError, "x: got MXGradArray"),
        (lambda: permute_mxfp8_fwd_hp_bwd(X, ENDS, 1, 3), TypeError, "mx: got .*allowed: an MXArray"),
        (lambda: unpermute_hp_fwd_mxfp8_bwd(X, permute(X, ENDS // 4, 1, 3)[1]), ValueError, "maps.row_map"),
        (lambda: unpermute_hp_fwd_mxfp8_bwd(MXArray.quantize(X), None), TypeError, "input: got MXArray"),
    ],
)
def test_a_bad_argument_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


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
