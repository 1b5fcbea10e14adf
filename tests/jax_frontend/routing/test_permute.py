"""Permuting and spreading of rows, and the gradients along the same maps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from mxep.jax_frontend import (
    MXArray,
    TokenReplicas,
    dispatch,
    gather_rows,
    grouped_mm,
    grouped_swiglu_ffn,
    ops,
    sort_by_expert,
)
from mxep.jax_frontend.exchange.rows import permute, spread_rows
from mxep.jax_frontend.integrations.torchao import permute_mxfp8_fwd_hp_bwd, unpermute_hp_fwd_mxfp8_bwd
from mxep.jax_frontend.ops.mx_array import MXGradArray

from ..references import normal

X, COUNTS = normal(192, 64), jnp.array([64, 0, 96], jnp.int32)


def test_permuting_moves_rows_and_gradients_through_one_map() -> None:
    rows, groups = normal(5, 64), normal(96, 64, seed=1)
    mx = MXArray.quantize(rows)
    (moved, maps), backward = jax.vjp(lambda mx: permute_mxfp8_fwd_hp_bwd(mx, jnp.array([3, 2], jnp.int32)), mx)
    expected = np.zeros((96, 64), np.float32)
    expected[[0, 1, 2, 32, 33]] = np.asarray(mx.dequantize(), np.float32)
    np.testing.assert_array_equal(moved.dequantize().astype(np.float32), expected)
    none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (moved, maps))
    (gradient,) = backward((dataclasses.replace(none[0], carrier=groups), none[1]))
    np.testing.assert_array_equal(gradient.carrier, groups[jnp.array([0, 1, 2, 32, 33])])
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: permute(X, jnp.array([[1, 2]], jnp.int32)),
            ValueError,
            r"shape \(1, 2\); allowed: \(G,\), or an Exchange",
        ),
        (lambda: permute(X, jnp.array([100, 100], jnp.int32)), ValueError, "at most 192"),
        (lambda: permute(X, jnp.array([1, 2], jnp.int32), 33), ValueError, "alignment: got 33"),
        (lambda: permute(X, jnp.ones(2)), TypeError, "num_tokens_per_expert: got dtype float32"),
        (lambda: permute(MXGradArray.wrap(X), COUNTS), TypeError, "x: got MXGradArray"),
        (lambda: permute_mxfp8_fwd_hp_bwd(X, COUNTS), TypeError, "mx: got .*allowed: an MXArray"),
        (lambda: unpermute_hp_fwd_mxfp8_bwd(X, permute(X, COUNTS // 4)[1]), ValueError, "maps.row_map"),
        (lambda: unpermute_hp_fwd_mxfp8_bwd(MXArray.quantize(X), None), TypeError, "input: got MXArray"),
    ],
)
def test_a_bad_argument_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("shape", [(), (1, 2, 2)])
def test_ids_are_of_slots_or_of_tokens(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"sort_by_expert: expert_ids: got shape \(.*\); allowed: \(T, top_k\) or \(S,\)"
    ):
        sort_by_expert(jnp.zeros(shape, int), 2)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int8"])
def test_ids_of_no_expert_are_clipped_inside_jit(dtype: str) -> None:
    """Eager calls and checkify report them. 400 experts are more than an id of 8 bits can name."""
    ids = jnp.array([[1, 0], [1, 9]], dtype)
    sort = jax.jit(lambda ids: sort_by_expert(ids, 4))
    jax.tree.map(np.testing.assert_array_equal, sort(ids), sort_by_expert(jnp.clip(ids, 0, 3), 4))
    jax.tree.map(np.testing.assert_array_equal, sort_by_expert(ids, 400), sort_by_expert(ids.astype("int32"), 400))
    message = r"sort_by_expert: expert_ids: got 9 at index \(1, 1\); allowed: 0 to 3"
    with pytest.raises(ValueError, match=message):
        sort_by_expert(ids, 4)
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        checkify.checkify(sort)(ids)[0].throw()


def test_the_rows_bring_their_group_ends() -> None:
    """A Route or a RowMap stands for its group ends, and only for rows that it laid out. MX rows follow their own."""
    order, inverse, counts = sort_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3)
    groups, _, laid = dispatch(TokenReplicas(jnp.ones((2, 32)), order, inverse, top_k=2), counts)
    w = jnp.ones((3, 32, 32))
    for product in (grouped_mm, lambda x, w, ends: grouped_swiglu_ffn(x, w, w, w, ends)):
        want = product(groups, w, laid.group_ends)
        for ends in (laid, laid.row_map):
            np.testing.assert_array_equal(product(groups, w, ends), want)
        with pytest.raises(ValueError, match=r"group_ends: got ends of 128 rows; allowed: the RowMap or Route"):
            product(groups.dequantize()[:96], w, laid)
        own = jnp.cumsum(counts)  # without the padding
        with pytest.raises(ValueError, match=r"group_ends: got \[1 3 4\]; allowed: the ends of x; pass the RowMap"):
            product(groups, w, own)
        np.testing.assert_array_equal(jax.jit(product)(groups, w, own), want)  # the rows' own
