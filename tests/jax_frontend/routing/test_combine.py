"""weighted_combine: its gradients against jax.grad of the formula, what it saves, where it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import ops, weighted_combine
from mxep.jax_frontend.ops.mx_array import MXGradArray

from ...compare import sqnr_db
from ..references import normal

TOKENS, TOP_K, DIM, PADDING = 40, 3, 64, 9
RNG = np.random.default_rng(0)
FILLED = np.flatnonzero(RNG.random(TOKENS * TOP_K) < 0.8)
ORDER = RNG.permutation(np.concatenate([FILLED, np.full(PADDING, -1)])).astype(np.int32)
SLOTS = np.full(TOKENS * TOP_K, -1, np.int32)
SLOTS[ORDER[ORDER >= 0]] = np.flatnonzero(ORDER >= 0)
SLOTS = SLOTS.reshape(TOKENS, TOP_K)
ROWS = normal(len(ORDER), DIM, dtype="float32")
PROBS, DY = normal(TOKENS, TOP_K, seed=1, dtype="float32"), normal(TOKENS, DIM, seed=2, dtype="float32")


def formula(rows, probs):
    gathered = jnp.where((SLOTS >= 0)[..., None], rows[SLOTS], 0)
    return (gathered * (jnp.ones_like(PROBS) if probs is None else probs)[..., None]).sum(1)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradients_are_those_of_the_formula(dtype: str, weighted: bool) -> None:
    probs, rows = PROBS if weighted else None, ROWS.astype(dtype)
    combine = jax.jit(lambda rows, probs: weighted_combine(rows, probs, SLOTS, ORDER, out_dtype="float32"))
    y, backward = jax.vjp(combine, rows, probs)
    expected, reference = jax.vjp(formula, rows.astype(jnp.float32), probs)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    drows, dprobs = backward(DY)
    want_rows, want_probs = reference(DY)
    assert drows.dtype == rows.dtype
    np.testing.assert_array_equal(drows, want_rows.astype(dtype))
    assert not np.asarray(drows)[ORDER < 0].any()
    if weighted:
        np.testing.assert_allclose(dprobs, want_probs, rtol=1e-5, atol=1e-5)


def test_the_result_has_the_dtype_asked_for_or_that_of_the_rows() -> None:
    rows = ROWS.astype(jnp.bfloat16)
    wide = weighted_combine(rows, PROBS, SLOTS, ORDER, out_dtype=jnp.float32)
    assert (wide.dtype, weighted_combine(rows, PROBS, SLOTS, ORDER).dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(weighted_combine(rows, PROBS, SLOTS, ORDER), wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("weighted", [True, False])
def test_an_unweighted_sum_saves_no_rows(weighted: bool) -> None:
    probs = PROBS if weighted else None
    _, backward = jax.vjp(lambda rows, probs: weighted_combine(rows, probs, SLOTS, ORDER), ROWS, probs)
    assert any(x.shape == ROWS.shape for x in jax.tree.leaves(backward)) == weighted


def test_both_gradients_of_rows_are_the_kernels() -> None:
    """The unweighted one is a gather here: the same bytes as combine_bwd."""
    rows, dy = ROWS.astype(jnp.bfloat16), DY.astype(jnp.bfloat16)
    (got,) = jax.vjp(lambda rows: weighted_combine(rows, None, SLOTS, ORDER), rows)[1](dy)
    np.testing.assert_array_equal(got, ops.combine_bwd(dy, rows, SLOTS, ORDER, np.zeros(0, np.float32))[0])


@pytest.mark.parametrize("weighted", [True, False])
def test_an_mx_gradient_is_that_of_the_rows_quantized(weighted: bool) -> None:
    """Without probabilities it is quantized before it is copied: copies of a row have the row's bytes."""
    probs, rows, dy = PROBS if weighted else None, ROWS.astype(jnp.bfloat16), DY.astype(jnp.bfloat16)

    def combine(rows):
        return weighted_combine(rows, probs, SLOTS, ORDER, rounding="floor")

    y, backward = jax.vjp(jax.jit(combine), MXGradArray.wrap(rows))
    expected, float_backward = jax.vjp(combine, rows)
    np.testing.assert_array_equal(y, expected)
    _, pair = backward(dy)[0].parts()
    for got, want in zip(pair, ops.quantize_row(float_backward(dy)[0], rounding="floor"), strict=True):
        np.testing.assert_array_equal(got, want)


def test_under_shard_map_remat_and_scan() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("ep",))

    def local(rows, probs):  # replicated rows, probabilities of each device: the rows' gradient is a sum
        return weighted_combine(rows, probs[0], SLOTS, ORDER)[None]

    sharded = jax.shard_map(jax.checkpoint(local), mesh=mesh, in_specs=(P(), P("ep")), out_specs=P("ep"))
    probs, dy = normal(4, TOKENS, TOP_K, dtype="float32"), normal(4, TOKENS, DIM, dtype="float32")
    y, backward = jax.vjp(jax.jit(sharded), ROWS, probs)
    expected = [jax.vjp(formula, ROWS, p) for p in probs]
    for i, (want, _) in enumerate(expected):
        np.testing.assert_allclose(y[i], want, rtol=1e-5, atol=1e-6)
    drows, dprobs = backward(dy)
    grads = [reference(g) for (_, reference), g in zip(expected, dy, strict=True)]
    assert sqnr_db(drows, sum(g[0] for g in grads)) > 100
    assert sqnr_db(dprobs, jnp.stack([g[1] for g in grads])) > 100

    def scanned(rows):
        return jax.lax.scan(lambda total, p: (total + weighted_combine(rows, p, SLOTS, ORDER), None), 0 * DY, probs)[0]

    got = jax.jit(jax.grad(lambda rows: (scanned(rows) * DY).sum()))(ROWS)
    assert sqnr_db(got, sum(jax.vjp(formula, ROWS, p)[1](DY)[0] for p in probs)) > 100


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: weighted_combine(ROWS, PROBS[:, :2], SLOTS, ORDER), ValueError, "combine: probs: got shape"),
        (lambda: weighted_combine([ROWS], PROBS, SLOTS, ORDER), TypeError, "weighted_combine: rows: got list"),
        (lambda: weighted_combine(ROWS, PROBS, SLOTS, ORDER[1:]), ValueError, "weighted_combine: order: got shape"),
        (lambda: weighted_combine(ROWS, PROBS, SLOTS.reshape(-1), ORDER), ValueError, "combine: slots: got shape"),
        (lambda: weighted_combine(ROWS.astype("float16"), PROBS, SLOTS, ORDER), TypeError, "rows: got dtype float16"),
        (lambda: weighted_combine(ROWS, PROBS.astype("bfloat16"), SLOTS, ORDER), TypeError, "probs: got dtype bf"),
        (lambda: weighted_combine(ROWS, PROBS, SLOTS, ORDER, out_dtype="float16"), TypeError, "out_dtype"),
        (
            lambda: jax.vmap(lambda p: weighted_combine(ROWS, p, SLOTS, ORDER))(PROBS[None]),
            NotImplementedError,
            r"jax\.vmap",
        ),
    ],
)
def test_a_bad_argument_is_named(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
