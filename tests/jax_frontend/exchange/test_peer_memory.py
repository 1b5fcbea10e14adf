"""transport=PeerMemory(...) has the same bytes as the all-to-all, here by the definition, an all-gather of the rows.
The program for a GPU reads rows through the kernels of peers alone."""

import dataclasses
import logging
import re
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.routing.plan import padded_rows
from mxep.jax_frontend import (
    MoEConfig,
    PeerMemory,
    RouterConfig,
    TokenReplicas,
    combine,
    dispatch,
    gather_rows,
    lower_for,
    moe,
    sort_by_expert,
    weighted_combine,
)
from mxep.jax_frontend.exchange import peer_memory
from mxep.jax_frontend.exchange.rows import spread_rows

from ...compare import same_bytes
from .test_replicas import TOKENS, cases_of, run


@pytest.mark.parametrize(
    ("routing", "ranks", "name", "weighted"),
    [
        ("random", 4, "mxfp8", False),
        ("twice", 2, "bf16", True),
        pytest.param("one expert", 2, "bf16", False, marks=pytest.mark.slow),
        pytest.param("one rank", 4, "mxfp8", False, marks=pytest.mark.slow),
        ("empty experts", 2, "bf16", True),
        ("no tokens", 2, "bf16", True),
    ],
)
def test_results_and_gradients(routing: str, ranks: int, name: str, weighted: bool) -> None:
    """y, dx and dprobs, the probabilities in the groups, and the bytes of the groups."""
    cases = cases_of(routing, ranks)
    want, got = (run(cases, name, weighted, None, peers=peers) for peers in (False, True))
    for a, b in zip(got, want, strict=True):
        same_bytes(a, b)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape), names)


def test_axes_of_one_rank_make_no_difference() -> None:
    mesh = mesh_of((1, 2), ("data", "expert"))
    x, axes = jnp.ones((8, 32)), ("data", "expert")
    config = MoEConfig(32, 32, 4, RouterConfig(2), recipe="bf16", transport=PeerMemory(mesh, axes))
    params = moe.init(jax.random.key(0), config)
    y, _ = moe.sharded_apply(params, x, config, tokens=P(axes), expert_axis=axes, mesh=mesh)
    np.testing.assert_allclose(y, moe.apply(params, x, dataclasses.replace(config, transport=None))[0], rtol=1e-2)


@pytest.mark.parametrize(("recipe", "prob_in"), [("mxfp8", "swiglu"), ("bf16", "input")])
def test_the_layer_on_a_mesh_of_data_and_expert_ranks(recipe: str, prob_in: Any) -> None:
    """y, statistics and gradients under remat; the ranks of an expert axis read from their own group alone."""
    mesh, results = mesh_of((2, 2), ("data", "expert")), []
    x = jax.random.normal(jax.random.key(1), (4 * TOKENS, 32), jnp.bfloat16)
    for transport in (None, PeerMemory(mesh, "expert")):
        router = RouterConfig(top_k=3, prob_in=prob_in)
        config = MoEConfig(32, 32, num_experts=4, router=router, recipe=recipe, transport=transport)
        layer = partial(moe.sharded_apply, config=config, tokens=P(("data", "expert")), mesh=mesh)

        def loss(params: Any, x: jax.Array, layer: Any = layer) -> Any:
            y, stats = jax.checkpoint(layer)(params, x)
            return (y.astype(jnp.float32) ** 2).sum() + stats.aux_loss, (y, stats)

        params = moe.init(jax.random.key(0), config)
        results.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        same_bytes(got, want)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_rank_of_one_expert_has_room_for_a_row_of_each_token(recipe: str) -> None:
    """Of tokens with two different experts. The bytes of one process, and room for a half of the rows."""
    mesh, ranks, top_k = mesh_of((4,), ("ep",)), 4, 2
    experts = jnp.argsort(jax.random.normal(jax.random.key(2), (ranks * TOKENS, 4)), axis=1)[:, :top_k]
    experts = experts.at[:, 0].set(jnp.where((experts == 3).any(1), experts[:, 0], 3))  # all tokens to the last rank
    x = jax.random.normal(jax.random.key(1), (ranks * TOKENS, 32), jnp.bfloat16)

    def layer(x: jax.Array, experts: jax.Array, axis: str | None, distinct: bool, transport: Any) -> Any:
        order, inverse, counts = sort_by_expert(experts, 4)
        tokens = TokenReplicas(x, order, inverse, top_k, distinct)
        groups, _, route = dispatch(tokens, counts, recipe=recipe, axis_name=axis, transport=transport)
        return combine(groups if recipe == "bf16" else groups.dequantize(), route), groups

    want = layer(x, experts, None, False, None)[0]
    for transport in (None, PeerMemory(mesh, "ep")):
        rows = []
        for distinct in (False, True):
            of_rank = partial(layer, axis="ep", distinct=distinct, transport=transport)
            y, groups = jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(x, experts)
            same_bytes(y, want)
            rows.append(groups.shape[0] // ranks)
        assert rows == [padded_rows(ranks * TOKENS * k, 1, BLOCK) for k in (top_k, 1)]


def test_a_full_rank_drops_the_last_rows() -> None:
    """Rows of rank 0, then of rank 1; with "drop" results and gradients of dropped rows are zeros; they are counted."""
    mesh, x = mesh_of((2,), ("ep",)), jnp.ones((16, 32))

    memory = PeerMemory(mesh, "ep")

    def of_rank(x: jax.Array, counts: jax.Array, factor: float | None) -> Any:
        options = {"recipe": "bf16", "axis_name": "ep", "capacity_factor": factor, "transport": memory}
        groups, sizes, route = dispatch(x, counts, **options, on_overflow="drop")
        return combine(groups, route)[:, 0], (sizes, route.overflow[None])

    def run(factor: float | None, *counts: int) -> Any:
        of_ranks = partial(of_rank, factor=factor)
        program = jax.jit(jax.shard_map(of_ranks, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        y, vjp, others = jax.vjp(lambda x: program(x, jnp.array(counts)), x, has_aux=True)
        assert (vjp(jnp.ones(16))[0][:, 0] == y).all()
        return y.reshape(2, 8).sum(1).tolist(), *(other.tolist() for other in others)

    # The counts of rank 0, then of rank 1. Rank 1 has a capacity of 10 rows: 8 of rank 0, 2 of the 5 of rank 1.
    assert run(10 / 8, 0, 8, 2, 5) == ([8, 4], [32, 32], [0, 3])
    assert run(6 / 8, 0, 8, 2, 5) == ([6, 2], [32, 32], [2, 5])
    # Wrong counts, which nothing checks under jit, are clipped to the rows.
    assert run(None, -1, 2**31 - 1, 9, 9) == ([8, 8], [32, 32], [0, 0])


@pytest.mark.parametrize("rounds", [False, True])
def test_the_program_for_gpus(rounds: bool) -> None:
    """Six calls of peers read rows, and ten for later rounds; collectives send counts and orders, at most 4 bytes a
    row, once."""
    mesh = mesh_of((2,), ("expert",))
    options: dict[str, Any] = {"transport": PeerMemory(mesh, "expert"), "on_overflow": "rounds" if rounds else "nan"}
    config = MoEConfig(64, 64, num_experts=4, router=RouterConfig(top_k=2), **options)
    params, x = moe.init(jax.random.key(0), config, jnp.bfloat16), jnp.ones((2 * TOKENS, 64), jnp.bfloat16)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return moe.sharded_apply(params, x, config, tokens=P("expert"), mesh=mesh)[0].astype(jnp.float32).sum()

    with lower_for("sm_90"):
        text = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    calls = (
        {"permute_mx": 5, "combine": 2, "permute_rows": 9}
        if rounds
        else {"permute_mx": 2, "combine": 2, "permute_rows": 2}
    )
    assert Counter(re.findall(r"@mxep\.peers\.(\w+)", text)) == calls
    assert "all_to_all" not in text
    gathered = re.findall(r"all_gather.*?-> tensor<([\dx]+)xi32>", text, re.DOTALL)
    assert sorted(gathered) == sorted(["2x4", str(2 * TOKENS * config.router.top_k)])


def test_choose(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mxep")
    mesh = mesh_of((2, 1), ("expert", "data"))
    assert PeerMemory.choose(mesh, "expert") is None
    with pytest.raises(ValueError, match=r"PeerMemory: axis_name: got 'ep'; allowed: axes of the mesh"):
        PeerMemory.choose(mesh, "ep")
    monkeypatch.setattr(peer_memory, "_platform", lambda mesh: "gpu")
    assert PeerMemory.choose(mesh, "data") is None
    monkeypatch.setattr(peer_memory.device, "compute_capability", lambda: (8, 0))
    assert PeerMemory.choose(mesh, "expert") is None
    allowed = "allowed: GPUs of one host, in a build with nvcc; or transport=None"
    with pytest.raises(NotImplementedError, match=f"PeerMemory: mesh: got no CUDA kernels in this build.*; {allowed}"):
        PeerMemory(mesh, "expert")
    monkeypatch.setattr(peer_memory.device, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(peer_memory.cpp_bindings, "cuda_archs", ((9, 0),))
    monkeypatch.setattr(peer_memory, "find_obstacle", lambda mesh, has_kernels: "processes on 2 hosts")
    assert PeerMemory.choose(mesh, "expert") is None
    with pytest.raises(ValueError, match=f"PeerMemory: mesh: got processes on 2 hosts; {allowed}"):
        PeerMemory(mesh, "expert")
    monkeypatch.setattr(peer_memory, "find_obstacle", lambda mesh, has_kernels: "")
    monkeypatch.setattr(PeerMemory, "_connect", lambda memory, limit_ms: None)
    memory = PeerMemory.choose(mesh, "expert", timeout=timedelta(seconds=1))
    assert memory is not None
    assert memory.ranks == 2
    by_all_to_all = "experts get their rows by all-to-all"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"PeerMemory.choose: devices of a CPU: {by_all_to_all}"),
        ("INFO", f"PeerMemory.choose: one rank: {by_all_to_all}"),
        ("WARNING", f"PeerMemory.choose: no CUDA kernels in this build for this GPU: {by_all_to_all}"),
        ("WARNING", f"PeerMemory.choose: processes on 2 hosts: {by_all_to_all}"),
        ("INFO", "PeerMemory.choose: experts get their rows through PeerMemory of 2 GPUs"),
    ]


def test_refused() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    memory, router = PeerMemory(mesh, "expert"), RouterConfig(top_k=2)
    with pytest.raises(TypeError, match=r"dispatch: transport: got str; allowed: PeerMemory or NoneType"):
        dispatch(jnp.ones((3, 32)), jnp.array([2, 1]), axis_name=None, capacity_factor=1, transport="wire")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"MoEConfig: deduplicate: got 'dispatch'; allowed: None with transport=Peer"):
        MoEConfig(32, 64, num_experts=4, router=router, deduplicate="dispatch", transport=memory)
    with pytest.raises(ValueError, match=r"PeerMemory: axis_name: got 'ep'; allowed: axes of the mesh, \('data', 'exp"):
        PeerMemory(mesh, "ep")
    with pytest.raises(ValueError, match="PeerMemory: timeout: got 0:00:00; allowed: a millisecond or more"):
        PeerMemory(mesh, "expert", timeout=timedelta())

    def part(x: jax.Array, function: Any) -> Any:
        axes = {"mesh": mesh, "in_specs": P("expert"), "out_specs": P("expert"), "axis_names": {"expert"}}
        return jax.jit(jax.shard_map(function, **axes))(x)

    index, probs, rows = jnp.arange(4, dtype=jnp.int32), jnp.ones((4, 1)), jnp.ones((8, 2))
    with pytest.raises(ValueError, match=r"weighted_combine: across: got PeerMemory.*; allowed: None with probs"):
        part(rows, lambda x: weighted_combine(x, probs, index[:, None], index, across=memory))
    other = PeerMemory(mesh_of((2, 1), ("data", "expert")), "data")
    with pytest.raises(ValueError, match="across: got 'data'; allowed: a mesh axis"):
        part(rows, lambda x: gather_rows(x, index, index, across=other))
    other = PeerMemory(mesh_of((2,), ("expert",)), "expert")
    with pytest.raises(
        ValueError, match=r"PeerMemory: got of a mesh with axes {'expert': 2}; allowed: one of this mesh"
    ):
        part(rows, lambda x: gather_rows(x, index, index, across=other))
    config = MoEConfig(64, 64, num_experts=4, router=router, transport=memory)
    layer = partial(moe.sharded_apply, config=config, tokens=P("data"), mesh=mesh, expert_axis="data")
    with pytest.raises(ValueError, match=r"transport: got PeerMemory.*; allowed: a PeerMemory along axis_name=.'data'"):
        jax.eval_shape(layer, moe.init(jax.random.key(0), config), jnp.ones((8, 64)))


def test_rows_of_a_part_of_the_mesh() -> None:
    """Inside of a shard_map over the experts alone, around which the axis of data is automatic."""
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    memory, x = PeerMemory(mesh, "expert"), jnp.arange(8, dtype=jnp.float32).reshape(8, 1)
    back = jnp.arange(8, dtype=jnp.int32)[::-1]

    def reverse(x: jax.Array) -> jax.Array:
        here = jax.lax.axis_index("expert") * 4 + jnp.arange(4)
        return gather_rows(x, back[here], back[here], across=memory)

    axes = {"mesh": mesh, "in_specs": P("expert"), "out_specs": P("expert"), "axis_names": {"expert"}}
    assert jax.jit(jax.shard_map(reverse, **axes))(x)[:, 0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]


def test_groups_of_devices() -> None:
    """The devices that differ along the axes alone, by rank: the first axis named varies slowest."""
    mesh = mesh_of((2, 1, 2), ("a", "b", "c"))
    assert PeerMemory(mesh, "a").groups.tolist() == [[0, 2], [1, 3]]
    assert PeerMemory(mesh, ("c", "a")).groups.tolist() == [[0, 2, 1, 3]]
    assert PeerMemory(mesh, ("b", "c")).groups.tolist() == [[0, 1], [2, 3]]


def test_maps_across_ranks() -> None:
    """Rows go to the next rank, and gradients back, by public functions."""
    mesh = mesh_of((4,), ("ep",))
    memory = PeerMemory(mesh, "ep")

    def around(x: jax.Array) -> jax.Array:
        rank, row = jax.lax.axis_index("ep"), jnp.arange(2, dtype=jnp.int32)
        to, back = (rank + 1) % 4 * 2 + row, (rank - 1) % 4 * 2 + row
        y = gather_rows(x, to, back, across=memory) * (rank + 1)
        return y + spread_rows(x, to, back, 1, across=memory)

    program = jax.jit(jax.shard_map(around, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    x = jnp.arange(8, dtype=jnp.float32).reshape(8, 1)
    y, vjp = jax.vjp(program, x)
    assert y[:, 0].tolist() == [4, 6, 12, 15, 24, 28, 0, 5]
    assert vjp(jnp.ones_like(y))[0][:, 0].tolist() == [5, 5, 2, 2, 3, 3, 4, 4]
