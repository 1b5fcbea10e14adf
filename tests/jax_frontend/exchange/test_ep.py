"""The all-to-alls inside shard_map on four devices: which row lands where, what a full part drops, the gradients."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import MXArray, TokenReplicas, combine, dispatch, gather_rows, grouped_mm, ops
from mxep.jax_frontend.exchange.all_to_all import plan_exchange
from mxep.jax_frontend.exchange.rows import a2a_dispatch, permute, spread_rows
from mxep.jax_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
)
from mxep.jax_frontend.ops.mx_array import MXGradArray

from ..references import normal

RANKS, EXPERTS, TOKENS, DIM = 4, 8, 12, 64
MESH = Mesh(np.array(jax.devices("cpu")[:RANKS]), ("ep",))
# rank 1 has no rows at all, rank 2 sends all of its rows to one expert, rank 3 leaves two rows unsent
COUNTS = np.array([[1, 2, 3, 0, 0, 4, 1, 1], [0] * 8, [0, 0, 0, 12, 0, 0, 0, 0], [2, 2, 2, 2, 1, 1, 0, 0]], np.int32)
ROWS = normal(RANKS * TOKENS, DIM)


def per_rank(function: Callable, *arguments: jax.Array) -> list:
    """Run on every rank with its part of each argument; the results of each rank."""
    sharded = jax.shard_map(function, mesh=MESH, in_specs=P("ep"), out_specs=P("ep"))
    results = jax.jit(sharded)(*arguments)
    parts = jax.tree.map(lambda x: np.split(np.asarray(x, np.float32), RANKS), results)
    return [jax.tree.map(lambda p, r=r: p[r], parts, is_leaf=lambda p: isinstance(p, list)) for r in range(RANKS)]


def kept(capacity: int) -> list[list[np.ndarray]]:
    """kept[r][d]: rank r's local rows that go to rank d, the first `capacity` of them."""
    ends = np.cumsum(COUNTS.reshape(RANKS, RANKS, -1).sum(2), 1)
    starts = ends - COUNTS.reshape(RANKS, RANKS, -1).sum(2)
    return [[np.arange(starts[r, d], ends[r, d])[:capacity] for d in range(RANKS)] for r in range(RANKS)]


def received(rows: np.ndarray, capacity: int, rank: int) -> np.ndarray:
    out = np.zeros((RANKS, capacity, rows.shape[-1]), np.float32)
    for source in range(RANKS):
        chosen = kept(capacity)[source][rank]
        out[source, : len(chosen)] = rows.reshape(RANKS, TOKENS, -1)[source, chosen]
    return out.reshape(RANKS * capacity, -1)


@pytest.mark.parametrize("capacity", [None, 12, 3, 1])
def test_rows_arrive_return_and_are_dropped_where_they_should(capacity: int | None) -> None:
    def there_and_back(counts, rows):
        exchange = plan_exchange(counts.reshape(-1), "ep", num_rows=TOKENS, capacity=capacity)
        there = a2a_dispatch(rows, exchange)
        back = a2a_combine_hp_fwd_mxfp8_bwd(there, exchange)
        quantized = a2a_dispatch_mxfp8_fwd_hp_bwd(rows, exchange)
        return there, back, quantized.dequantize(), exchange.recv_counts, exchange.overflow[None]

    c = capacity or TOKENS
    rows = np.asarray(ROWS, np.float32)
    quantized = np.asarray(MXArray.quantize(ROWS).dequantize(), np.float32)
    for rank, (there, back, mx, recv_counts, overflow) in enumerate(per_rank(there_and_back, COUNTS, ROWS)):
        np.testing.assert_array_equal(there, received(rows, c, rank))
        np.testing.assert_array_equal(mx, received(quantized, c, rank))
        expected = np.zeros((TOKENS, DIM), np.float32)
        for chosen in kept(c)[rank]:
            expected[chosen] = rows.reshape(RANKS, TOKENS, -1)[rank, chosen]
        np.testing.assert_array_equal(back, expected)
        assert overflow[0] == COUNTS[rank].sum() - sum(map(len, kept(c)[rank]))
        sizes = [[len(kept(c)[source][rank])] for source in range(RANKS)]
        np.testing.assert_array_equal(recv_counts.reshape(RANKS, -1).sum(1, keepdims=True), sizes)
        if overflow.sum() == 0 and capacity is None:
            np.testing.assert_array_equal(recv_counts.reshape(RANKS, -1), COUNTS.reshape(RANKS, RANKS, -1)[:, rank])


@pytest.mark.parametrize("capacity", [None, 3])
def test_gradients_take_the_way_back_and_dropped_rows_have_none(capacity: int | None) -> None:
    """Dispatch returns floats as they are; the combine returns what MXFP8 keeps of them."""
    c = capacity or TOKENS
    dthere, dback = normal(RANKS * RANKS * c, DIM, seed=1), normal(RANKS * TOKENS, DIM, seed=2)

    def gradients(counts, rows, there, dthere, dback):
        exchange = plan_exchange(counts.reshape(-1), "ep", num_rows=TOKENS, capacity=capacity)
        _, dispatched = jax.vjp(lambda x: a2a_dispatch_mxfp8_fwd_hp_bwd(x, exchange).dequantize(), rows)
        combined = [
            jax.vjp(lambda x, mx=mx: a2a_combine_hp_fwd_mxfp8_bwd(x, exchange, mxfp8_bwd=mx), there)[1]
            for mx in (True, False)
        ]
        _, as_bytes = jax.vjp(lambda x: a2a_combine_hp_fwd_mxfp8_bwd(x, exchange), MXGradArray.wrap(there))
        q, sf = as_bytes(dback)[0].parts()[1]
        return *dispatched(dthere), *(c(dback)[0] for c in combined), MXArray.from_bytes(q, sf).dequantize()

    quantized = np.asarray(MXArray.quantize(dback).dequantize(), np.float32)
    results = per_rank(gradients, COUNTS, ROWS, jnp.zeros_like(dthere), dthere, dback)
    all_dthere = np.asarray(dthere, np.float32).reshape(RANKS, RANKS, c, DIM)
    for rank, (drows, mx, floats, as_bytes) in enumerate(results):
        expected = np.zeros((TOKENS, DIM), np.float32)
        for target, chosen in enumerate(kept(c)[rank]):
            expected[chosen] = all_dthere[target, rank, : len(chosen)]
        np.testing.assert_array_equal(drows, expected)
        np.testing.assert_array_equal(mx, received(quantized, c, rank))
        np.testing.assert_array_equal(as_bytes, received(quantized, c, rank))
        np.testing.assert_array_equal(floats, received(np.asarray(dback, np.float32), c, rank))


def test_the_dequantized_all_to_all_quantizes_both_ways_in_both_directions() -> None:
    there, dthere = normal(RANKS * RANKS * TOKENS, DIM, seed=1), normal(RANKS * RANKS * TOKENS, DIM, seed=2)
    dback = normal(RANKS * TOKENS, DIM, seed=3)

    def both(counts, rows, there, dthere, dback):
        exchange = plan_exchange(counts.reshape(-1), "ep", num_rows=TOKENS)
        y, forward = jax.vjp(lambda x: to_mxfp8_a2a_dequant(x, exchange), rows)
        z, reverse = jax.vjp(lambda x: to_mxfp8_a2a_dequant(x, exchange, reverse=True), there)
        plain_z, plain_forward = (
            a2a_combine_hp_fwd_mxfp8_bwd(x, exchange, mxfp8_bwd=False) for x in map(_requantized, (there, dthere))
        )
        plain_y, plain_reverse = (a2a_dispatch(x, exchange) for x in map(_requantized, (rows, dback)))
        return (y, *forward(dthere), z, *reverse(dback)), (plain_y, plain_forward, plain_z, plain_reverse)

    for got, expected in per_rank(both, COUNTS, ROWS, there, dthere, dback):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def _requantized(x: jax.Array) -> jax.Array:
    return MXArray.quantize(x).dequantize()


def test_the_permute_takes_the_exchange() -> None:
    """Which says how many rows a rank's part has, with slack too."""
    sizes = {"num_rows": RANKS * 5, "num_local_experts": EXPERTS // RANKS, "rank_rows": 5}

    def both(counts, rows):
        exchange = plan_exchange(counts.reshape(-1), "ep", num_rows=TOKENS, capacity=5)
        there = a2a_dispatch(rows, exchange)
        maps = ops.row_map(exchange.recv_counts, **sizes)
        by_hand = gather_rows(there, maps.row_map, maps.inverse), maps
        mx, _ = permute_mxfp8_fwd_hp_bwd(MXArray.quantize(there), exchange)
        return permute(there, exchange), by_hand, mx.dequantize()

    for alone, by_hand, mx in per_rank(both, COUNTS, ROWS):
        for got, want in zip(jax.tree.leaves(alone), jax.tree.leaves(by_hand), strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(mx, MXArray.quantize(by_hand[0]).dequantize())


def test_rows_of_an_exchange_with_counts_of_ones_own_fit_no_weights() -> None:
    """Counts of all experts, or those received, are as many groups: more than a rank has experts."""

    def own(counts, rows):
        exchange = plan_exchange(counts.reshape(-1), "ep", num_rows=TOKENS)
        there = a2a_dispatch_mxfp8_fwd_hp_bwd(rows, exchange)
        for sizes in (counts.reshape(-1), exchange.recv_counts):
            groups, maps = permute(there, sizes)
            with pytest.raises(ValueError, match="group_ends: got shape"):
                grouped_mm(groups, jnp.ones((EXPERTS // RANKS, 32, rows.shape[1])), maps)
        return rows

    per_rank(own, COUNTS, ROWS)


def test_another_mesh_axis_may_be_automatic() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def there_and_back(counts, rows):
        exchange = plan_exchange(counts, "ep", num_rows=TOKENS)
        return a2a_combine_hp_fwd_mxfp8_bwd(a2a_dispatch(rows, exchange), exchange)

    specs = {"in_specs": (P("ep"), P("ep")), "out_specs": P("ep"), "axis_names": {"ep"}}
    run = jax.jit(jax.shard_map(there_and_back, mesh=mesh, **specs))
    np.testing.assert_array_equal(run(jnp.full(8, 3, jnp.int32), ROWS[: 2 * TOKENS]), ROWS[: 2 * TOKENS])


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_wrong_counts_are_clipped_inside_jit(capacity_factor: float | None) -> None:
    """A kernel that raised on one rank would end the process, since the others wait for that rank."""

    def there_and_back(counts, rows):
        options = {"axis_name": "ep", "capacity_factor": capacity_factor, "on_overflow": "drop"}
        groups, _, route = dispatch(rows, counts.reshape(-1), **options)
        return combine(groups.dequantize(), route)

    wrong, fitting = COUNTS.copy(), COUNTS.copy()
    wrong[1], fitting[1] = [-3, 4, 2**31 - 1, 5, 0, 0, 0, -1], [0, 4, TOKENS - 4, 0, 0, 0, 0, 0]
    for got, want in zip(per_rank(there_and_back, wrong, ROWS), per_rank(there_and_back, fitting, ROWS), strict=True):
        np.testing.assert_array_equal(got, want)


def test_without_an_axis_nothing_is_sent() -> None:
    exchange = plan_exchange(jnp.array([3, 0, 9], jnp.int32), None, num_rows=TOKENS)
    np.testing.assert_array_equal(a2a_dispatch(ROWS[:TOKENS], exchange), ROWS[:TOKENS])
    assert (exchange.ep_degree, exchange.capacity, int(exchange.overflow)) == (1, TOKENS, 0)
    assert exchange.recv_counts.tolist() == [3, 0, 9]


def one_rank(counts: int = 4, **options) -> Callable:
    return lambda: plan_exchange(jnp.full(counts, 3, jnp.int32), None, num_rows=TOKENS, **options)


def replicas(top_k: int = 4, order: int = 12, inverse: int = 12, dtype: str = "int32") -> TokenReplicas:
    return TokenReplicas(ROWS[:3], jnp.arange(order, dtype=dtype), jnp.arange(inverse), top_k)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (one_rank(capacity=0), "capacity: got 0; allowed: 1 to "),
        (one_rank(counts=5), "at most 12"),
        (lambda: plan_exchange(jnp.full(4, 2**30, jnp.int32), None, num_rows=TOKENS), "at most 12, the rows"),
        (lambda: plan_exchange(jnp.array([13, -1], jnp.int32), None, num_rows=TOKENS), "counts of at least 0"),
        (
            lambda: plan_exchange(jnp.full((2, 2), 3, jnp.int32), None, num_rows=TOKENS),
            r"shape \(2, 2\); allowed: \(E,\)",
        ),
        (lambda: a2a_dispatch(replicas(inverse=13), one_rank()()), r"inverse: got shape \(13,\); allowed: \(12,\)"),
        (lambda: a2a_dispatch(replicas(5, 15, 15), one_rank()()), r"input: got shape \(3, 64\) with top_k 5; .* = 12"),
        (lambda: permute(ROWS[:13], one_rank()()), r"x: got shape \(13, 64\); allowed: 12 rows, what the exchange"),
        (lambda: MXGradArray.wrap(normal(12, 48)), "MXGradArray.wrap: value: got last dim = 48"),
        (lambda: plan_exchange(jnp.zeros(8, jnp.int32), "nowhere", num_rows=4), "axis_name: got 'nowhere'"),
        (lambda: a2a_dispatch_mxfp8_fwd_hp_bwd(normal(5, 64), one_rank()()), r"shape \(5, 64\); allowed: \(12, D\)"),
        (lambda: a2a_dispatch_mxfp8_fwd_hp_bwd(normal(12, 40), one_rank()()), "multiples of 32"),
        (lambda: a2a_combine_hp_fwd_mxfp8_bwd(normal(12, 40), one_rank()()), "last dim = 40"),
        (lambda: to_mxfp8_a2a_dequant(normal(12, 64), one_rank()(), "up"), "'rceil', 'floor'"),
    ],
)
def test_a_bad_argument_is_named(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_exchange(jnp.ones(4), None, num_rows=TOKENS), "counts: got dtype float32"),
        (lambda: a2a_dispatch(replicas(dtype="float32"), one_rank()()), "order: got dtype float32"),
        (lambda: MXGradArray.wrap(ROWS[:12]) * 2, r"MXGradArray: operand: .* use `\.value`"),
        (lambda: a2a_dispatch_mxfp8_fwd_hp_bwd(_mx(), one_rank()()), "input: got MXArray"),
        (lambda: a2a_dispatch(_mx(), one_rank()()), "input: got MXArray"),
        (lambda: a2a_combine_hp_fwd_mxfp8_bwd(_mx(), one_rank()()), "input: got MXArray; .* or an MXGradArray"),
        (lambda: to_mxfp8_a2a_dequant(MXGradArray.wrap(ROWS[:12]), one_rank()()), "input: got MXGradArray"),
        (lambda: a2a_dispatch(normal(12, 64).astype("float16"), one_rank()()), "input: got dtype float16"),
    ],
)
def test_a_bad_type_is_named(call, message) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def _mx() -> MXArray:
    return MXArray.quantize(ROWS[:TOKENS])


def test_an_axis_that_does_not_divide_the_experts_is_refused() -> None:
    def plan(counts):
        return plan_exchange(counts, "ep", num_rows=TOKENS).overflow[None]

    with pytest.raises(ValueError, match="6 experts; allowed: multiples of the 4 ranks of mesh axis 'ep'"):
        jax.shard_map(plan, mesh=MESH, in_specs=P(), out_specs=P("ep"))(jnp.zeros(6, jnp.int32))


@pytest.mark.parametrize("capacity", [None, 5])
@pytest.mark.parametrize("send", [a2a_dispatch, lambda x, e: a2a_dispatch_mxfp8_fwd_hp_bwd(x, e).dequantize()])
def test_tokens_are_sent_as_their_replicas_would_be(send: Callable, capacity: int | None) -> None:
    """The same rows are received, and the same gradient is returned, also with dropped replicas."""
    top_k = 3
    ids = jnp.asarray(np.random.default_rng(0).integers(0, EXPERTS, (RANKS, TOKENS * top_k)), jnp.int32)

    def local(straight: bool, ids, x, grad):
        order, inverse, counts = ops.sort_by_expert(ids[0], EXPERTS)
        exchange = plan_exchange(counts, "ep", num_rows=TOKENS * top_k, capacity=capacity)

        def there(x):
            if straight:
                return send(TokenReplicas(x, order, inverse, top_k), exchange)
            return send(spread_rows(x, order, inverse, top_k), exchange)

        rows, backward = jax.vjp(there, x)
        return rows, *backward(grad[0])

    received_rows = RANKS * (capacity or TOKENS * top_k)
    grad = normal(RANKS, received_rows, DIM, seed=1)
    straight, spread = (per_rank(partial(local, way), ids, ROWS, grad) for way in (True, False))
    for got, want in zip(straight, spread, strict=True):
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w)
        assert np.abs(want[1]).max() > 0
