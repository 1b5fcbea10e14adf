"""The arrays with rows and gradients in MXFP8: the received bytes, and the functions that may read them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.jax_frontend import MXArray, TokenReplicas, combine, dispatch, grouped_mm, ops, sort_by_expert
from mxep.jax_frontend.exchange.all_to_all import plan_exchange
from mxep.jax_frontend.exchange.rows import permute
from mxep.jax_frontend.integrations.torchao import a2a_combine_hp_fwd_mxfp8_bwd, unpermute_hp_fwd_mxfp8_bwd
from mxep.jax_frontend.ops.mx_array import MXGradArray

from ..references import normal

M, K, N, SIZES = 192, 64, 96, [64, 0, 96]
ENDS = jnp.asarray(np.cumsum(SIZES), jnp.int32)
X, W, DOUT = normal(M, K), normal(len(SIZES), N, K, seed=1), normal(M, N, seed=2)


def to_experts_and_back(x, w, mx_grad: bool, **options):
    """permute -> grouped product -> un-permute -> combine, on one rank with unaligned counts."""
    counts = jnp.array([41, 0, 87], jnp.int32)
    exchange = plan_exchange(counts, None, num_rows=x.shape[0])
    groups, maps = permute(x, exchange)
    out = grouped_mm(groups, w, maps.group_ends, recipe="mxfp8_wgrad_with_hp", mx_grad=mx_grad)
    return a2a_combine_hp_fwd_mxfp8_bwd(unpermute_hp_fwd_mxfp8_bwd(out, maps), exchange, **options)


def test_an_mx_gradient_reaches_the_product_as_the_bytes_that_were_sent() -> None:
    """The input gradient quantizes its operand along the rows, and permuting and quantizing rows commute. So received
    MXFP8 bytes and received floats, quantized afterwards, give the same bits."""
    x, dy = normal(128, K, seed=3), normal(128, N, seed=4)

    def gradients(mx_grad: bool, mxfp8_bwd: bool):
        y, backward = jax.vjp(partial(to_experts_and_back, mx_grad=mx_grad, mxfp8_bwd=mxfp8_bwd), x, W)
        return y, *backward(dy)

    y, dx, dw = jax.jit(partial(gradients, True, True))()
    for mx_grad, mxfp8_bwd in ((False, False), (True, False), (False, True)):
        same = jax.jit(partial(gradients, mx_grad, mxfp8_bwd))()
        np.testing.assert_array_equal(same[0], y)
        np.testing.assert_array_equal(same[1], dx)
        # bf16 weight gradients read the received values: floats, or dequantized MXFP8
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


@pytest.mark.parametrize(
    ("factors", "unpermuted", "recipe"),
    [
        ((1, -0.5), False, "mxfp8"),
        ((1, -1), False, "mxfp8"),
        ((3, -2), False, "mxfp8"),
        ((1, -1), True, "mxfp8_wgrad_with_hp"),
    ],
)
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


@pytest.mark.parametrize("deduplicate", [None, "dispatch", "both"])
def test_combine_refuses_an_mx_gradient_of_a_route_without_mxfp8(deduplicate: Any) -> None:
    order, inverse, counts = sort_by_expert(jnp.array([[0, 1], [1, 0]]), num_experts=2)
    tokens = TokenReplicas(jnp.ones((2, 32)), order, inverse, 2)
    groups, _, route = dispatch(tokens, counts, recipe="bf16", deduplicate=deduplicate)
    with pytest.raises(TypeError, match="combine: groups: got an MXGradArray; allowed: an array, after a dispatch of"):
        combine(MXGradArray.wrap(groups), route)


@pytest.mark.parametrize(
    "misuse", [jnp.sum, jnp.sin, lambda x: x * 2, lambda x: jnp.dot(x, x)], ids=["sum", "sin", "product", "dot"]
)
def test_an_mx_gradient_in_arithmetic_names_the_way_out(misuse) -> None:
    wrapped = MXGradArray.wrap(jnp.ones((4, 32)))
    with pytest.raises(TypeError, match=r"MXGradArray.*use `.value` elsewhere"):
        misuse(wrapped)
    with pytest.raises(TypeError, match=r"MXGradArray.*use `.value` elsewhere"):
        jax.jit(lambda x: misuse(MXGradArray.wrap(x)))(jnp.ones((4, 32)))
