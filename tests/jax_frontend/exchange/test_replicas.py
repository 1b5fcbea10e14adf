"""A token is sent once to each rank: "dispatch" has the bytes of None, "both" the oracle's; on four devices."""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.policy.deduplicate import CHOICES, Deduplicate
from mxep.jax_frontend import (
    MoEConfig,
    MXArray,
    PeerMemory,
    RouterConfig,
    TokenReplicas,
    combine,
    dispatch,
    dispatch_probs,
    moe,
    ops,
    save_mx_rows,
    sort_by_expert,
)

from ...compare import same_bytes
from ...replicas import LOCAL, RUNS, TOP_K, Case, case, expected

TOKENS = 12


def times(rows: Any, factors: jax.Array) -> jax.Array:
    if isinstance(rows, MXArray):
        rows = ops.dequantize(rows.q, rows.sf)
    return (rows.astype(jnp.float32) * factors[:, None]).astype(jnp.bfloat16)


@jax.custom_vjp
def multiply(groups: Any, factors: jax.Array) -> jax.Array:
    """The experts of tests/replicas.py."""
    return times(groups, factors)


def multiply_fwd(groups: Any, factors: jax.Array) -> tuple[jax.Array, Any]:
    return times(groups, factors), (factors, None if isinstance(groups, MXArray) else groups.dtype.type(0))


def multiply_bwd(residuals: Any, grad: jax.Array) -> tuple[Any, None]:
    factors, plain = residuals
    drows = times(grad, factors)
    return MXArray.cotangent(drows) if plain is None else drows, None


multiply.defvjp(multiply_fwd, multiply_bwd)


def joined(arrays: Any) -> np.ndarray:
    return np.concatenate(list(arrays))


@cache
def program(
    ranks: int, name: str, weighted: bool, how: Deduplicate, factor: float | None, peers: bool
) -> Callable[..., Any]:
    """Compiled for all routings. peers: by PeerMemory."""
    mesh = Mesh(np.array(jax.devices("cpu")[:ranks]), ("ep",))
    memory = PeerMemory(mesh, "ep")

    def of_a_rank(
        factors: jax.Array, x: jax.Array, experts: jax.Array, probs: jax.Array, dy: jax.Array
    ) -> tuple[Any, ...]:
        def layer(x: jax.Array, probs: jax.Array) -> tuple[jax.Array, Any]:
            order, inverse, counts = sort_by_expert(experts, LOCAL * ranks)
            tokens, options = TokenReplicas(x, order, inverse, TOP_K), {"recipe": RUNS[name], "capacity_factor": factor}
            options |= {"transport": memory if peers else None, "on_overflow": "drop"}
            groups, _, route = dispatch(tokens, counts, axis_name="ep", deduplicate=how, **options)
            row = jnp.arange(groups.shape[0])[:, None]
            local = jnp.minimum((row >= route.group_ends).sum(1), LOCAL - 1)
            out = multiply(groups, factors[local])
            sent = jax.lax.stop_gradient((dispatch_probs(probs, route), groups))
            return combine(out, route, probs if weighted else None), sent

        y, backward, (inside, groups) = jax.vjp(layer, x, probs, has_aux=True)
        bytes_of = (groups.q, groups.sf) if isinstance(groups, MXArray) else groups
        return y, *backward(dy), inside, bytes_of

    return jax.jit(jax.shard_map(of_a_rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


def run(
    cases: list[Case],
    name: str,
    weighted: bool,
    how: Deduplicate,
    factor: float | None = None,
    peers: bool = False,
) -> list[np.ndarray]:
    """y, dx and dprobs of all ranks; the probabilities in the groups; the groups, or their bytes."""
    of_ranks = (jnp.asarray(joined(getattr(c, n) for c in cases)) for n in ("x", "experts", "probs", "dy"))
    compiled = program(len(cases), name, weighted, how, factor, peers)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(compiled(jnp.asarray(cases[0].factors), *of_ranks))]


def cases_of(routing: str, ranks: int) -> list[Case]:
    """Equally many tokens on each rank."""
    return [case(routing, rank, ranks, tokens=TOKENS) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("routing", "ranks", "name", "weighted"),
    [
        ("random", 4, "mxfp8", True),
        ("twice", 2, "mxfp8", False),
        pytest.param("one expert", 2, "bf16", False, marks=pytest.mark.slow),
        pytest.param("one rank", 2, "mxfp8", True, marks=pytest.mark.slow),
        ("empty experts", 2, "bf16", True),
        ("no tokens", 2, "bf16", False),
    ],
)
def test_results_and_gradients(routing: str, ranks: int, name: str, weighted: bool) -> None:
    cases = cases_of(routing, ranks)
    each, once, summed = (run(cases, name, weighted, how) for how in CHOICES)
    for got, want in zip(once, each, strict=True):
        same_bytes(got, want)
    for got, want in zip(summed[3:], each[3:], strict=True):
        same_bytes(got, want)
    wanted = [expected(c, RUNS[name], weighted) for c in cases]
    for got, *want in zip(summed[: 2 + weighted], *wanted, strict=False):
        same_bytes(got, joined(want))


@pytest.mark.parametrize("capacity", [1, 7])
def test_dropped_replicas(capacity: int) -> None:
    """The replicas that do not fit are those that do not fit one by one."""
    factor = capacity * 2 / (TOKENS * TOP_K)  # rows of a pair of ranks
    each, once, summed = (run(cases_of("random", 2), "mxfp8", False, how, factor) for how in CHOICES)
    for got, want in zip(once, each, strict=True):
        same_bytes(got, want)
    for got, want in zip(summed[3:], each[3:], strict=True):
        same_bytes(got, want)
    assert (each[0] == 0).all(-1).any()  # a token without any replica


def test_the_wire_has_room_for_tokens_not_for_replicas() -> None:
    """The parts of the compiled program's all-to-alls, in bytes per pair of ranks."""
    ranks, d, k = 2, 64, TOP_K
    mesh = Mesh(np.array(jax.devices("cpu")[:ranks]), ("ep",))
    found = {}
    for how in CHOICES:

        def layer(x: jax.Array, experts: jax.Array, how: Deduplicate = how) -> jax.Array:
            order, inverse, counts = sort_by_expert(experts, LOCAL * ranks)
            groups, _, route = dispatch(TokenReplicas(x, order, inverse, k), counts, axis_name="ep", deduplicate=how)
            return combine(groups.dequantize(), route)

        program = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        x, experts = jnp.ones((ranks * TOKENS, d), jnp.bfloat16), jnp.zeros((ranks * TOKENS, k), jnp.int32)
        text = program.lower(x, experts).as_text()
        shapes = re.findall(r"stablehlo\.all_to_all.*?-> tensor<([\dx]+)x(\w+)>", text, re.DOTALL)
        found[how] = sorted((int(rows.split("x")[0]) // ranks, rows.split("x")[1:], kind) for rows, kind in shapes)
    assert found[None][1:] == [(k * TOKENS, [str(d)], "ui16"), (k * TOKENS, [str(d + d // 32)], "ui8")]
    assert (TOKENS, [str(d + d // 32)], "ui8") in found["dispatch"]
    assert (k * TOKENS, [str(d)], "ui16") in found["dispatch"]
    assert (k * TOKENS, [], "i32") in found["dispatch"]
    transfers = [(TOKENS, [str(d)], "ui16"), (TOKENS, [str(d + d // 32)], "ui8")]
    assert [part for part in found["both"] if part[2] != "i32"] == transfers


def test_a_layer() -> None:
    """y, statistics and gradients of "dispatch" equal the results of None, under remat."""
    mesh, results = Mesh(np.array(jax.devices("cpu")[:2]), ("ep",)), []
    x = jax.random.normal(jax.random.key(1), (2 * TOKENS, 32), jnp.bfloat16)
    for how in CHOICES[:2]:
        config = MoEConfig(32, 32, num_experts=4, router=RouterConfig(top_k=3), deduplicate=how)
        params = moe.init(jax.random.key(0), config)

        def loss(params: Any, x: jax.Array, config: MoEConfig = config) -> Any:
            of_params = {"router": P(), "experts": P("ep")}
            layer = partial(moe.apply, config=config, axis_name="ep")
            layer = jax.shard_map(layer, mesh=mesh, in_specs=(of_params, P("ep")), out_specs=(P("ep"), P()))
            y, stats = jax.checkpoint(layer, policy=save_mx_rows)(params, x)
            return (y.astype(jnp.float32) ** 2).sum() + stats.aux_loss, (y, stats)

        results.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        same_bytes(got, want)


def test_refused() -> None:
    counts, x = jnp.array([2, 1]), jnp.ones((3, 32))
    with pytest.raises(ValueError, match=r"dispatch: deduplicate: got 'dispatch'; allowed: None for rows"):
        dispatch(x, counts, deduplicate="dispatch")
    with pytest.raises(ValueError, match=r"deduplicate: got 'twice'; allowed: None, 'dispatch', 'both'"):
        dispatch(x, counts, deduplicate="twice")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"MoEConfig: deduplicate: got 'both'; allowed: None with prob_in='input'"):
        MoEConfig(32, 64, num_experts=4, router=RouterConfig(top_k=2, prob_in="input"), deduplicate="both")
