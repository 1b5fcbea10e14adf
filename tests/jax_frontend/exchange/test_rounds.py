"""A layer over peer memory whose rows need several rounds loses no row, and has the bytes of one round with room for
all rows, here by the definition. test_device_exchange.py has the rounds of programs, in scans of recomputed layers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.policy.rounds import list_rounds
from mxep.core_kernels.routing.plan import padded_rows
from mxep.jax_frontend import MoEConfig, PeerMemory, RouterConfig, moe, quantize_weights
from mxep.jax_frontend.exchange.rounds import take_rows

from ...compare import same_bytes, sqnr_db
from .test_peer_memory import mesh_of

TOKENS, DIM, HIDDEN, LOCAL, TOP_K, FACTOR = 40, 64, 32, 4, 2, 0.4
CAPACITY = padded_rows(int(FACTOR * TOKENS * TOP_K), LOCAL, BLOCK)
ROUTINGS = "random", "one expert", "one rank", "skewed"
ENOUGH_OR_ROUNDS: tuple[dict[str, Any], ...] = {"on_overflow": "nan"}, {"capacity_factor": FACTOR}
"""One round with room for all rows, and several rounds."""
SPLIT_SQNR = 45.0
"""dB of the weight gradients of an expert that is in several rounds, sums of bf16 values, as in PyTorch."""


@pytest.mark.parametrize(("ranks", "local"), [(2, 1), (2, 3), (4, 2), (3, 8)])
def test_a_round_takes_the_rows_of_list_rounds(ranks: int, local: int) -> None:
    """Of tables of counts, most of them unbalanced, and of capacities from the least on."""
    rng, take, most = np.random.default_rng(ranks * local), jax.jit(take_rows, static_argnums=2), 0
    for _ in range(50):
        shares = rng.dirichlet(np.full(ranks * local, 0.3))
        counts = np.array([rng.multinomial(rng.integers(0, 400), shares) for _ in range(ranks)])
        capacity = padded_rows(int(rng.integers(1, 400)), local, BLOCK)
        left, listed = jnp.asarray(counts, jnp.int32), list_rounds(counts, capacity, BLOCK)
        for one in listed:
            np.testing.assert_array_equal(left, one.counts)
            left = left - take(left, capacity, BLOCK)
        assert not left.any()
        most = max(most, len(listed))
    assert most > 2


def routed(routing: str, ranks: int) -> np.ndarray:
    """(tokens, TOP_K) distinct experts. one expert: of every token the last of rank 0. one rank: all of rank 0."""
    experts, rng = LOCAL * ranks, np.random.default_rng(0)
    scores = rng.gumbel(size=(ranks * TOKENS, experts))
    if routing == "one expert":
        scores[:, LOCAL - 1] += 100
    elif routing == "one rank":
        scores[:, :LOCAL] += 100
    elif routing == "skewed":
        scores += np.log(rng.dirichlet(np.full(experts, 0.2)) + 1e-4)
    return np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)


def rounds_of_experts(counts: np.ndarray, ranks: int, capacity: int) -> tuple[int, np.ndarray]:
    """The rounds of a call, and the rounds that each expert is in. They depend on no rank of the tokens."""
    table = np.zeros((ranks, counts.size), np.int64)
    table[0] = counts
    left = [one.counts for one in list_rounds(table, capacity, BLOCK)]
    rows = [(a - b).sum(0) for a, b in zip(left, [*left[1:], 0 * table], strict=True)]
    return len(left), np.sum([r > 0 for r in rows], 0)


@pytest.mark.parametrize(
    ("ranks", "recipe", "prob_in", "bias"),
    [
        (2, "mxfp8", "swiglu", False),
        (2, "fp8_blockwise", "combine", False),
        pytest.param(2, "mxfp8", "combine", False, marks=pytest.mark.slow),
        pytest.param(4, "mxfp8_wgrad_with_hp", "input", True, marks=pytest.mark.slow),
        pytest.param(4, "fp8_rowwise", "swiglu", True, marks=pytest.mark.slow),
        pytest.param(4, "bf16", "combine", True, marks=pytest.mark.slow),
    ],
)
def test_no_row_is_lost(ranks: int, recipe: str, prob_in: Any, bias: bool) -> None:
    """The bytes of y and of the gradients of x, of the weights of the rows and of all experts that are not split."""
    programs, mesh = [], mesh_of((ranks,), ("expert",))
    config = partial(MoEConfig, DIM, HIDDEN, LOCAL * ranks, RouterConfig(TOP_K, prob_in=prob_in), recipe=recipe)
    for options in ENOUGH_OR_ROUNDS:
        of_layer = config(bias=bias, transport=PeerMemory(mesh, "expert"), **options)
        layer = partial(moe.sharded_apply, config=of_layer, tokens=P("expert"), mesh=mesh)

        def results(params: Any, x: Any, probs: Any, dy: Any, ids: Any, layer: Any = layer) -> Any:
            run = lambda params, x, probs: layer(params, x, experts=ids, weights=probs)  # noqa: E731
            y, backward, stats = jax.vjp(run, params, x, probs, has_aux=True)
            return y, stats, backward(dy)

        programs.append(jax.jit(results))
    params = moe.init(jax.random.key(0), config(bias=bias), jnp.bfloat16)
    x, dy = (jax.random.normal(jax.random.key(i), (ranks * TOKENS, DIM), jnp.bfloat16) for i in (1, 2))
    probs = jax.random.uniform(jax.random.key(3), (ranks * TOKENS, TOP_K))
    for routing in ROUTINGS:
        want, got = (run(params, x, probs, dy, routed(routing, ranks)) for run in programs)
        (y, stats, (weights, dx, dprobs)), (y_r, stats_r, (weights_r, dx_r, dprobs_r)) = want, got
        for one, other in zip((y, dx, dprobs, *stats), (y_r, dx_r, dprobs_r, *stats_r), strict=True):
            same_bytes(other, one)
        rounds, of_experts = rounds_of_experts(np.asarray(stats.counts), ranks, CAPACITY)
        assert rounds > 1 or routing in ("random", "skewed"), (routing, rounds)
        assert routing != "one expert" or of_experts[LOCAL - 1] > 1
        for name, grads in weights["experts"].items():
            for e, (one, other) in enumerate(zip(grads, weights_r["experts"][name], strict=True)):
                if of_experts[e] < 2:
                    same_bytes(other, one)
                else:
                    assert sqnr_db(other, one) > SPLIT_SQNR, (routing, name, e)


def test_a_scan_of_layers_saves_no_copy_of_the_weights() -> None:
    """The backward of later rounds reads the argument of the scan."""
    mesh = mesh_of((2,), ("expert",))
    config = MoEConfig(DIM, HIDDEN, LOCAL * 2, RouterConfig(TOP_K), transport=PeerMemory(mesh, "expert"))
    layer = partial(moe.sharded_apply, config=config, tokens=P("expert"), mesh=mesh)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, params: (x + layer(params, x)[0], None), x, params)
        return y.astype(jnp.float32).sum()

    params = jax.eval_shape(lambda: moe.init(jax.random.key(0), config, jnp.bfloat16))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct((3, *p.shape), p.dtype), params)
    x = jax.ShapeDtypeStruct((2 * TOKENS, DIM), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(params, x).jaxpr
    forward, _ = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    saved = [(*out.aval.shape, str(out.aval.dtype)) for out in forward.outvars]  # type: ignore[attr-defined]
    experts = [(*w.shape, str(w.dtype)) for w in params["experts"].values()]
    assert not set(saved) & set(experts), saved
    assert (3, 2 * TOKENS, DIM, "bfloat16") in saved


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "frozen", "tensor"])
def test_other_weights(kind: str) -> None:
    """Bytes next to values that get the gradient; bytes without a gradient; dim F of the weights over two ranks."""
    ranks, results = 2, []
    names = ("tensor", "expert") if kind == "tensor" else ("expert",)
    mesh, tensor = mesh_of((2,) * len(names), names), "tensor" if kind == "tensor" else None
    memory = PeerMemory(mesh, "expert")
    config = partial(MoEConfig, DIM, 2 * HIDDEN, LOCAL * ranks, RouterConfig(TOP_K), transport=memory)
    ids, x = routed("one rank", ranks), jax.random.normal(jax.random.key(1), (ranks * TOKENS, DIM), jnp.bfloat16)
    params = moe.init(jax.random.key(0), config(), jnp.bfloat16)
    probs = jax.random.uniform(jax.random.key(3), (ranks * TOKENS, TOP_K))

    def loss(params: Any, x: jax.Array, layer: Any) -> jax.Array:
        experts = params["experts"]
        if kind != "tensor":
            experts = {name: quantize_weights(w, frozen=kind == "frozen") for name, w in experts.items()}
        y, _ = layer(params | {"experts": experts}, x, experts=ids, weights=probs)
        return (y.astype(jnp.float32) ** 2).sum()

    for options in ENOUGH_OR_ROUNDS:
        layer = partial(moe.sharded_apply, tokens=P("expert"), mesh=mesh, tensor_axis=tensor)
        layer = partial(layer, config=config(**options))
        results.append(jax.jit(jax.value_and_grad(partial(loss, layer=layer), (0, 1)))(params, x))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        same_bytes(got, want)
