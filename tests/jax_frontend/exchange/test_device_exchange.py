"""A layer whose exchange the device drives has the bytes of the layer over the kernels of peers, here by definition.
Its program for a GPU has one call per direction."""

import math
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mxep import cpp_bindings
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.peer.programs import ffn
from mxep.core_kernels.peer.programs import program as programs
from mxep.core_kernels.peer.programs.writer import Sizes
from mxep.core_kernels.policy.recipe import Recipe
from mxep.core_kernels.registry import OPS
from mxep.core_kernels.routing.plan import padded_rows
from mxep.jax_frontend import MoEConfig, PeerMemory, RouterConfig, lower_for, moe
from mxep.jax_frontend.exchange import device_exchange
from mxep.jax_frontend.layer import moe_layer

from ...compare import same_bytes
from .test_peer_memory import mesh_of
from .test_rounds import rounds_of_experts

DIM, HIDDEN, TOP_K, TOKENS, FACTOR = 512, 64, 3, 48, 0.4
CAPACITY = padded_rows(math.ceil(FACTOR * TOKENS * TOP_K), 2, BLOCK)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every size and device; the list counts the layers that the device drives while its first value is True."""
    switch, real = [True], device_exchange.exchange_ffn
    monkeypatch.setattr(ffn, "takes_ffn", lambda *sizes: True)
    monkeypatch.setattr(device_exchange, "runs_here", lambda: switch[0])

    def counted(*arguments: Any) -> Any:
        switch.append(True)
        return real(*arguments)

    monkeypatch.setattr(moe_layer, "exchange_ffn", counted)
    return switch


def config_of(mesh: Mesh, **options: Any) -> MoEConfig:
    recipe = Recipe.parse("mxfp8", compute="fold")
    router = RouterConfig(TOP_K, prob_in="swiglu")
    memory = PeerMemory(mesh, "expert")
    return MoEConfig(DIM, HIDDEN, 2 * memory.ranks, router, recipe=recipe, transport=memory, **options)


def params_of(config: MoEConfig) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim == 3 else p, moe.init(jax.random.key(0), config))


def loss(params: Any, x: jax.Array, layer: Any) -> Any:
    y, stats = layer(params, x)
    return jnp.nan_to_num(y.astype(jnp.float32) ** 2).sum() + stats.aux_loss, (y, stats)


@pytest.mark.parametrize(
    ("ranks", "factor", "on_overflow", "again"),
    [
        pytest.param(2, None, "nan", False, marks=pytest.mark.slow),
        (4, FACTOR, "rounds", True),
        (2, FACTOR, "nan", False),
        (2, FACTOR, "drop", False),
    ],
)
def test_the_layer(everywhere: list[bool], ranks: int, factor: float | None, on_overflow: Any, again: bool) -> None:
    """y, statistics and all gradients; a capacity below the mean has several rounds, or loses some rows."""
    mesh = mesh_of((ranks,), ("expert",))
    config = config_of(mesh, capacity_factor=factor, on_overflow=on_overflow)
    params, results = params_of(config), []
    x = jax.random.normal(jax.random.key(1), (ranks * TOKENS, DIM), jnp.bfloat16)
    for driven in (False, True):
        everywhere[0] = driven
        layer: Any = partial(moe.sharded_apply, config=config, tokens=P("expert"), mesh=mesh)
        layer = jax.checkpoint(layer) if again else layer
        step = jax.value_and_grad(partial(loss, layer=layer), argnums=(0, 1), has_aux=True)
        results.append(jax.jit(step)(params, x))
    assert len(everywhere) == 2, everywhere  # traced once, in the second turn
    stats = results[1][0][1][1]
    assert (int(stats.overflow) > 0) == (factor is not None and on_overflow != "rounds")
    assert on_overflow != "rounds" or rounds_of_experts(np.asarray(stats.counts), ranks, CAPACITY)[0] > 1
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        same_bytes(got, want)


def test_rows_of_fp32_take_the_kernels_of_peers(everywhere: list[bool]) -> None:
    """y has their dtype, which the device's sums of slots do not return."""
    mesh = mesh_of((2,), ("expert",))
    config = config_of(mesh)
    layer = partial(moe.sharded_apply, config=config, tokens=P("expert"), mesh=mesh)
    params = params_of(config)
    for dtype, driven in ((jnp.float32, 0), (jnp.bfloat16, 1)):
        before = len(everywhere)
        y, _ = jax.eval_shape(layer, params, jnp.ones((2 * TOKENS, DIM), dtype))
        assert (y.dtype, len(everywhere) - before) == (dtype, driven)


@pytest.mark.parametrize("inside", [False, True])
def test_a_mesh_of_data_and_expert_ranks(everywhere: list[bool], inside: bool) -> None:
    """inside: a shard_map over the experts alone, around which the axis of data is automatic."""
    mesh, results = mesh_of((2, 2), ("data", "expert")), []
    config = config_of(mesh, capacity_factor=FACTOR)
    params, x = params_of(config), jax.random.normal(jax.random.key(1), (4 * TOKENS, DIM), jnp.bfloat16)
    for driven in (False, True):
        everywhere[0] = driven
        layer: Any = partial(moe.sharded_apply, config=config, tokens=P(("expert", "data")))
        if inside:
            specs = {"router": P(), "experts": P("expert")}, P("expert")
            layer = jax.shard_map(layer, in_specs=specs, out_specs=(P("expert"), P()), axis_names={"expert"})
        with jax.set_mesh(mesh):
            results.append(jax.jit(jax.value_and_grad(partial(loss, layer=layer), has_aux=True))(params, x))
    assert len(everywhere) == 2
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        same_bytes(got, want)


@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit])
def test_a_scan_of_recomputed_layers_whose_input_is_donated(everywhere: list[bool], kind: AxisType) -> None:
    """On a mesh of automatic and of explicit axes, in several rounds; x has the type that its layer returns."""
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (kind, kind), devices=jax.devices("cpu")[:4])
    config, results, tokens = config_of(mesh, capacity_factor=FACTOR), [], P(("data", "expert"))
    params, specs = jax.tree.map(lambda p: jnp.stack([p, p / 2]), params_of(config)), moe.specs(config)
    specs = jax.tree.map(lambda spec: P(None, *spec), specs, is_leaf=lambda spec: isinstance(spec, P))
    params = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params, specs)

    def layers(params: Any, x: jax.Array) -> Any:
        layer = jax.checkpoint(partial(moe.sharded_apply, config=config, tokens=tokens, mesh=mesh))
        y = jax.lax.scan(lambda x, p: (x + layer(p, x)[0], None), x, params)[0]
        return (y.astype(jnp.float32) ** 2).sum(), y

    for driven in (False, True):
        everywhere[0] = driven
        x = jax.random.normal(jax.random.key(1), (4 * TOKENS, DIM), jnp.bfloat16)
        step = jax.jit(jax.value_and_grad(layers, argnums=(0, 1), has_aux=True), donate_argnums=1)
        with jax.set_mesh(mesh):
            results.append(step(params, jax.device_put(x, NamedSharding(mesh, tokens))))
    assert len(everywhere) > 1
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        same_bytes(got, want)


@pytest.mark.skipif("exchange_program" not in cpp_bindings.peer_ffi_targets(), reason="no CUDA kernels in this build")
def test_the_program_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call per direction, with rounds three in loops, and no kernel of peers for rows; nothing is patched but the
    number of chains."""
    monkeypatch.setattr(ffn, "takes_ffn", lambda *sizes: True)
    for on_overflow, number in (("nan", 2), ("rounds", 5)):
        mesh = mesh_of((2,), ("expert",))
        config = config_of(mesh, on_overflow=on_overflow)
        params, x = params_of(config), jnp.ones((2 * TOKENS, DIM), jnp.bfloat16)
        layer = partial(moe.sharded_apply, config=config, tokens=P("expert"), mesh=mesh)
        with lower_for("sm_90"):
            step = jax.jit(jax.value_and_grad(partial(loss, layer=layer), has_aux=True))
            text = step.trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
        calls = Counter(part.split('"')[0].split("(")[0] for part in text.split("@mxep.peers.")[1:])
        assert calls == {"exchange_program": number}, calls


def test_numbers_of_a_program() -> None:
    """`encode` has every array, and a step's arrays by their number."""
    sizes = Sizes(0, 2, 4, 256, DIM, 2048, TOP_K, "bfloat16", 0, (1.0, 0.0, 0.0))
    static = device_exchange.Static(PeerMemory(mesh_of((2,), ("expert",)), "expert"), sizes, 96, True)
    program, table = static.program, (*OPS, *programs.EXCHANGE_OPS)
    numbers = programs.encode(program, static.inputs, static.outputs, table)
    assert numbers[0] == len(program.arrays)
    assert all(isinstance(number, int) for number in numbers)
    assert set(program.given) <= set(static.inputs)
    ends = np.array([program.places[n] + programs.nbytes_of(program.arrays[n]) for n in program.places])
    assert ends.max() == program.nbytes
