"""A capacity that is too small: the tokens that lose a row are NaN, the others have the bytes with enough capacity."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import MoEConfig, PeerMemory, combine, dispatch, dispatch_probs, moe
from mxep.jax_frontend.routing.overflow import nan_gradients, nan_gradients_of_probs, nan_values

from ...compare import same_bytes
from ...layer_options import layer_options
from ..references import normal

RANKS, TOKENS, DIM, EXPERTS, TOP_K, CAPACITY = 2, 24, 32, 8, 3, 32
LOCAL = EXPERTS // RANKS
FACTOR = CAPACITY * RANKS / (TOKENS * TOP_K)  # 32 rows from each rank to each
MESH = Mesh(np.array(jax.devices("cpu")[:RANKS]), ("ep",))
MEMORY = PeerMemory(MESH, "ep")
X, DY = (normal(RANKS * TOKENS, DIM, seed=seed, dtype="float32") for seed in (0, 1))
RNG = np.random.default_rng(0)
CHOSEN = np.array([RNG.choice(EXPERTS, TOP_K, replace=False, p=np.arange(1, 9) / 36) for _ in X], np.int32)
WEIGHTS = jnp.asarray(RNG.integers(1, 64, CHOSEN.shape).astype(np.float32) / 64)


def config(**changes: Any) -> MoEConfig:
    return MoEConfig(DIM, 64, EXPERTS, **layer_options(TOP_K, **changes))


PARAMS = moe.init(jax.random.key(0), config())


def lost_slots(shared_room: bool) -> np.ndarray:
    """(tokens, TOP_K) bool. A pair of ranks has a capacity for the first rows by expert. With shared_room a rank has a
    capacity for RANKS times as many rows, expert after expert, rows of rank 0 first."""
    lost = np.zeros(CHOSEN.shape, bool)
    for owner in range(RANKS):
        slots = [(e, t // TOKENS, t, k) for (t, k), e in np.ndenumerate(CHOSEN) if e // LOCAL == owner]
        sources: Any = [range(RANKS)] if shared_room else [[rank] for rank in range(RANKS)]
        for ranks in sources:
            for _, _, t, k in sorted(slot for slot in slots if slot[1] in ranks)[CAPACITY * len(ranks) :]:
                lost[t, k] = True
    return lost


@cache
def run(layer_config: MoEConfig) -> dict[str, Any]:
    """y, the gradients for DY, and the number of lost rows."""
    specs = {"router": P(), "experts": P("ep")}

    def of_rank(params: Any, x: jax.Array, weights: jax.Array, experts: jax.Array) -> Any:
        return moe.apply(params, x, layer_config, experts=experts, weights=weights, axis_name="ep")

    layer = jax.shard_map(of_rank, mesh=MESH, in_specs=(specs, P("ep"), P("ep"), P("ep")), out_specs=(P("ep"), P()))

    def of_layer(params: Any, x: jax.Array, weights: jax.Array) -> Any:
        return layer(params, x, weights, jnp.asarray(CHOSEN))

    @jax.jit
    def program(params: Any, x: jax.Array, weights: jax.Array) -> Any:
        y, backward, stats = jax.vjp(of_layer, params, x, weights, has_aux=True)
        return y, stats.overflow, backward(DY)

    y, overflow, (params, dx, dweights) = program(PARAMS, X, WEIGHTS)
    return {"y": y, "x": dx, "weights": dweights, "experts": params["experts"], "overflow": int(overflow)}


@pytest.mark.parametrize(
    ("peers", "deduplicate", "recipe", "prob_in"),
    [
        (False, None, "mxfp8", "swiglu"),
        (False, None, "bf16", "input"),
        (False, "dispatch", "mxfp8", "swiglu"),
        (False, "both", "mxfp8_wgrad_with_hp", "combine"),
        (True, None, "bf16", "combine"),
    ],
)
def test_the_tokens_that_lose_a_row_are_nan(peers: bool, deduplicate: Any, recipe: str, prob_in: Any) -> None:
    """So are their gradients and the gradients of the lost rows' weights. The experts' gradients for a dy without NaN
    equal the gradients with "drop"."""
    options = {"deduplicate": deduplicate, "recipe": recipe, "prob_in": prob_in}
    options |= {"transport": MEMORY if peers else None}
    # "dispatch" has the bytes of None: test_replicas.py
    enough = run(config(**options | {"deduplicate": None if deduplicate == "dispatch" else deduplicate}))
    nan, drop = (run(config(**options, capacity_factor=FACTOR, on_overflow=how)) for how in ("nan", "drop"))
    lost = lost_slots(peers)
    of_token = np.asarray(lost.any(1))
    assert (enough["overflow"], nan["overflow"], drop["overflow"]) == (0, lost.sum(), lost.sum())
    assert 0 < of_token.sum() < of_token.size
    for name, rows in (("y", of_token), ("x", of_token), ("weights", lost)):
        got, want, dropped = (np.asarray(found[name]) for found in (nan, enough, drop))
        assert np.isnan(got[rows]).all(), name
        same_bytes(got[~rows], want[~rows])
        assert np.isfinite(dropped).all(), name
    for name, got in nan["experts"].items():
        same_bytes(got, drop["experts"][name])


def test_a_training_step_that_loses_a_row_is_loud() -> None:
    """The loss is NaN, the gradients of the router and of every expert with another row of a lost token too."""
    params = PARAMS | {"router": PARAMS["router"].at[5].add(10.0)}

    def loss(params: Any, x: jax.Array, on_overflow: Any) -> jax.Array:
        layer = partial(
            moe.sharded_apply,
            config=config(capacity_factor=8 * RANKS / (TOKENS * TOP_K), on_overflow=on_overflow),
            mesh=MESH,
        )
        y, stats = layer(params, x, tokens=P("ep"), expert_axis="ep")
        return (y**2).mean() + 0.01 * stats.aux_loss

    step = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    value, grads = step(params, jnp.abs(X), "nan")
    assert np.isnan(value)
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(grads))
    value, grads = step(params, jnp.abs(X), "drop")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, grads)))


@pytest.mark.parametrize("peers", [False, True])
def test_rows_of_no_expert_are_not_lost(peers: bool) -> None:
    """Rows past the sum of the counts are zeros, as with enough capacity. Two ranks with 3 and 5 of 6 rows."""
    counts, x = jnp.array([[1, 2], [3, 2]]), jnp.ones((12, 32))
    transport = MEMORY if peers else None

    def of_rank(x: jax.Array, counts: jax.Array) -> Any:
        options = {"axis_name": "ep", "capacity_factor": 2 / 3, "transport": transport, "recipe": "bf16"}
        groups, _, route = dispatch(x, counts[0], **options)
        assert isinstance(groups, jax.Array)
        return combine(groups, route)[:, 0], route.overflow[None]

    y, overflow = jax.jit(jax.shard_map(of_rank, mesh=MESH, in_specs=P("ep"), out_specs=P("ep")))(x, counts)
    nan = float("nan")
    np.testing.assert_array_equal(y, [1, 1, 1, 0, 0, 0, 1, 1, 1 if peers else nan, 1, 1, 0])
    assert overflow.tolist() == [0, 0 if peers else 1]


def test_room_for_all_rows_compares_nothing() -> None:
    """A capacity of all rows makes the program of no capacity."""
    counts, x = jnp.array([2, 1]), jnp.ones((3, 32))
    _, _, route = dispatch(x, counts, capacity_factor=1)
    assert route.lost is None
    _, _, route = dispatch(x, counts, capacity_factor=0.6)
    assert route.lost is not None
    assert route.lost.tolist() == [False, False, True]


def test_the_weight_of_a_lost_row_has_a_nan_gradient() -> None:
    """Of rows, whose weights have one dim."""
    x, probs = jnp.ones((3, 32)), jnp.ones(3)
    _, _, route = dispatch(x, jnp.array([2, 1]), capacity_factor=0.6)
    grad = jax.grad(lambda probs: dispatch_probs(probs, route).sum())(probs)
    np.testing.assert_array_equal(grad, [1, 1, float("nan")])


def test_a_lost_row_is_nan_as_a_whole_whatever_its_width() -> None:
    """Also where a row is as long as a token has experts."""
    lost = jnp.array([[True, False], [False, False]])
    x = jnp.ones((2, 2))
    np.testing.assert_array_equal(nan_values("op", x, lost), [[jnp.nan] * 2, [1, 1]])
    grad = jax.grad(lambda x: nan_gradients("op", x, lost).sum())(x)
    np.testing.assert_array_equal(grad, [[jnp.nan] * 2, [1, 1]])
    grad = jax.grad(lambda x: nan_gradients_of_probs("op", x, lost).sum())(x)
    np.testing.assert_array_equal(grad, [[jnp.nan, 1], [1, 1]])


@pytest.mark.parametrize(
    ("error", "factor", "got"),
    [
        (TypeError, "1.25", "'1.25'"),
        (TypeError, True, "True"),
        (ValueError, 0, "0"),
        (ValueError, float("nan"), "nan"),
        (ValueError, float("inf"), "inf"),
    ],
)
def test_a_bad_factor_is_named(error: Any, factor: Any, got: str) -> None:
    allowed = "capacity_factor: got {}; allowed: a number above 0, or None for dropless"
    with pytest.raises(error, match=f"MoEConfig: {allowed.format(got)}"):
        config(capacity_factor=factor)
    with pytest.raises(error, match=f"dispatch: {allowed.format(got)}"):
        dispatch(jnp.ones((3, 32)), jnp.array([2, 1]), capacity_factor=factor)


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"MoEConfig: on_overflow: got 'raise'; allowed: 'rounds', 'nan', 'drop'"):
        config(on_overflow="raise")
    allowed = "allowed: 'nan', 'drop' or None with transport=None"
    with pytest.raises(ValueError, match=f"MoEConfig: on_overflow: got 'rounds'; {allowed}"):
        config(on_overflow="rounds")
    with pytest.raises(ValueError, match=r"dispatch: on_overflow: got None; allowed: 'nan', 'drop'"):
        dispatch(jnp.ones((3, 32)), jnp.array([2, 1]), on_overflow=None)  # type: ignore[arg-type]
