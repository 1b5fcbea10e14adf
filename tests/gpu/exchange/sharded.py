"""Programs of jax.jit with sharded inputs, on given devices: every op that is divided, gradients, the layer.

test_sharded.py runs CHECKS on one GPU and on two, jax_frontend/layer/test_sharded_devices.py on two CPU devices.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.routing.plan import padded_rows
from mxep.jax_frontend import MoEConfig, MXArray, PeerMemory, RouterConfig, moe, ops, swiglu
from mxep.jax_frontend.ops import device
from mxep.jax_frontend.ops.split import WHOLE_DIMS

from ...compare import same_bytes, sqnr_db
from ...jax_frontend.ops.row_inputs import inputs_of

DIVIDED_ON_GPUS = {"quantize_col", "quantize_both", "swiglu_row", "swiglu_row_fold", "swiglu_bwd_row"}
"""On automatic axes, where XLA divides the calls of CUDA C++ alone; the others gather their rows there."""
ROWS, DIM = 64, 128
CONFIG = MoEConfig(DIM, 256, num_experts=8, router=RouterConfig(top_k=2), recipe="bf16")

Devices = Sequence[jax.Device]


def mesh_of(devices: Devices, kind: AxisType) -> Mesh:
    return jax.make_mesh((len(devices),), ("expert",), (kind,), devices=devices)


def collectives(text: str) -> Counter[str]:
    names = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    return Counter(re.findall(rf" ({names})(?:-start)?\(", text))


def arguments(name: str) -> tuple[jax.Array, ...]:
    """The inputs of the op, with rows or matrices first."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, up, dh = (jax.random.normal(key, (ROWS, DIM), jnp.bfloat16) for key in keys)
    prob = jnp.linspace(0, 1, ROWS)
    return inputs_of(name, x, up, dh, prob, x.reshape(4, -1, 64))


def same_in_parts(function: Callable[..., Any], mesh: Mesh, arrays: tuple[jax.Array, ...]) -> Counter[str]:
    """The collectives of the function on arrays with rows sharded on the mesh; results equal the run on one device."""
    placed = [jax.device_put(x, NamedSharding(mesh, P("expert", *(None,) * (x.ndim - 1)))) for x in arrays]
    program = jax.jit(function).lower(*placed).compile()
    one = [jax.device_put(x, mesh.devices.flat[0]) for x in arrays]
    for got, want in zip(jax.tree.leaves(program(*placed)), jax.tree.leaves(jax.jit(function)(*one)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    return collectives(str(program.as_text()))


def ops_run_on_their_rows(devices: Devices, kind: AxisType) -> None:
    mesh = mesh_of(devices, kind)
    for name in WHOLE_DIMS:
        found = same_in_parts(getattr(ops, name), mesh, arguments(name))
        if kind == AxisType.Explicit or name in DIVIDED_ON_GPUS or devices[0].platform == "cpu":
            assert not found, (name, found)


def gradients_are_those_of_one_device(devices: Devices, kind: AxisType) -> None:
    def loss(x: jax.Array, up: jax.Array, prob: jax.Array) -> jax.Array:
        h = swiglu(MXArray.quantize(x).dequantize(), up, prob).astype(jnp.float32)
        return (h * jnp.arange(DIM)).sum()

    same_in_parts(jax.grad(loss, (0, 1, 2)), mesh_of(devices, kind), arguments("swiglu"))


def the_layer_is_that_of_one_device(devices: Devices, kind: AxisType) -> None:
    """All devices are ranks of the experts."""
    mesh, tokens = mesh_of(devices, kind), P("expert")
    x = jax.random.normal(jax.random.key(1), (ROWS, DIM))
    of_params = moe.specs(CONFIG)
    params = moe.init(jax.random.key(0), CONFIG)
    placed = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params, of_params)

    def gradient(layer: Callable[..., Any]) -> Callable[..., Any]:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            y, stats = layer(params, x)
            return (y**2).mean() + 0.01 * stats.aux_loss

        return jax.jit(jax.value_and_grad(loss, (0, 1)))

    layer = partial(moe.sharded_apply, config=CONFIG, tokens=tokens, mesh=mesh)
    arrays = placed, jax.device_put(x, NamedSharding(mesh, tokens))
    program = gradient(layer).lower(*arrays).compile()
    got, want = program(*arrays), gradient(partial(moe.apply, config=CONFIG))(params, x)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        # Sums in another order, rounded to bf16: a last bit, 2^-8 of a value, in half of the values is 51 dB.
        assert sqnr_db(np.asarray(a, np.float32), np.asarray(b, np.float32)) > 40, jax.tree_util.keystr(path)
    found = collectives(str(program.as_text()))
    assert bool(found["all-to-all"]) == (len(devices) > 1), found
    assert not found["all-gather"], found


def peer_memory_has_the_bytes_of_the_all_to_all(devices: Devices, kind: AxisType) -> None:
    """Three layers in a scan, skewed routing, three runs each; on GPUs also words of 4 and 16 bytes, MXFP8 and bf16.
    The device drives the exchange of the first case on two Hopper GPUs."""
    mesh, tokens = mesh_of(devices, kind), P("expert")
    chosen = PeerMemory.choose(mesh, "expert")
    assert (chosen is None) == (devices[0].platform == "cpu" or len(devices) == 1)
    memory = chosen or PeerMemory(mesh, "expert")
    cases = (512, 2048, "mxfp8", "swiglu"), (DIM, 256, "mxfp8", "combine"), (DIM, 256, "bf16", "combine")
    for dim, hidden, recipe, prob_in in cases if devices[0].platform == "gpu" else cases[-1:]:
        params = moe.init(jax.random.key(0), replace(CONFIG, dim=dim, hidden_dim=hidden))
        params["experts"] = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["experts"])
        params["router"] = params["router"].at[0].add(0.2)
        x = jax.random.normal(jax.random.key(1), (ROWS, dim), jnp.bfloat16)
        placed = jax.tree.map(lambda p, of: jax.device_put(p, NamedSharding(mesh, of)), params, moe.specs(CONFIG))
        arrays, results = (placed, jax.device_put(x, NamedSharding(mesh, tokens))), []
        for transport in (None, memory):
            router = replace(CONFIG.router, prob_in=prob_in)
            config = replace(CONFIG, dim=dim, hidden_dim=hidden, recipe=recipe, router=router, transport=transport)
            layer = partial(moe.sharded_apply, config=config, tokens=tokens, mesh=mesh)

            def loss(params: Any, x: jax.Array, layer: Callable = layer) -> tuple[jax.Array, jax.Array]:
                y, stats = jax.lax.scan(lambda x, _: layer(params, x), x, None, 3)
                return (y.astype(jnp.float32) ** 2).mean() + stats.aux_loss.sum(), y

            program = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
            drives = dim == 512 and transport is not None and len(devices) > 1 and device.arch() == "sm_90"
            assert drives == ("exchange_program" in program.lower(*arrays).as_text())
            results += [program(*arrays) for _ in range(3)]
        want = jax.tree.leaves(results[0])
        for result in results[1:]:
            for a, b in zip(jax.tree.leaves(result), want, strict=True):
                same_bytes(np.asarray(a), np.asarray(b))


def rounds_have_the_bytes_of_one_round(devices: Devices, kind: AxisType) -> None:
    """Two layers in a scan: y and the gradients of x and of the router; an expert may be split over rounds. On GPUs the
    device drives the rounds of the first case, as above."""
    mesh, tokens, rows = mesh_of(devices, kind), P("expert"), 16 * ROWS
    memory = PeerMemory(mesh, "expert")
    cases = (512, 2048, "mxfp8", "swiglu"), (DIM, 256, "bf16", "swiglu"), (DIM, 256, "mxfp8", "combine")
    for dim, hidden, recipe, prob_in in cases if devices[0].platform == "gpu" else cases[1:]:
        router = replace(CONFIG.router, prob_in=prob_in)
        config = replace(CONFIG, dim=dim, hidden_dim=hidden, recipe=recipe, router=router, transport=memory)
        params = moe.init(jax.random.key(0), config)
        params["experts"] = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["experts"])
        placed = jax.tree.map(lambda p, of: jax.device_put(p, NamedSharding(mesh, of)), params, moe.specs(config))
        x = jax.random.normal(jax.random.key(1), (rows, dim), jnp.bfloat16)
        arrays, results = (placed, jax.device_put(x, NamedSharding(mesh, tokens))), []
        for options in ({"on_overflow": "nan"}, {"capacity_factor": 0.4}):
            layer = partial(moe.sharded_apply, config=replace(config, **options), tokens=tokens, mesh=mesh)

            def loss(params: Any, x: jax.Array, layer: Callable = layer) -> tuple[jax.Array, Any]:
                y, stats = jax.lax.scan(lambda x, _: layer(params, x), x, None, 2)
                return (y.astype(jnp.float32) ** 2).mean() + stats.aux_loss.sum(), (y, stats)

            results.append(jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*arrays))
        (one, grads), (several, grads_of_rounds) = results
        most = np.asarray(several[1][1].counts).reshape(2, len(devices), -1).sum(2).max()
        assert most > padded_rows(math.ceil(0.4 * most), CONFIG.num_experts // len(devices), BLOCK)
        split = [tree[0].pop("experts") for tree in (grads, grads_of_rounds)]
        for a, b in zip(*map(jax.tree.leaves, ((several, grads_of_rounds), (one, grads))), strict=True):
            same_bytes(np.asarray(a), np.asarray(b))
        for a, b in zip(*map(jax.tree.leaves, split), strict=True):
            assert sqnr_db(np.asarray(a, np.float32), np.asarray(b, np.float32)) > 45, (recipe, prob_in)


CHECKS = (
    ops_run_on_their_rows,
    gradients_are_those_of_one_device,
    the_layer_is_that_of_one_device,
    peer_memory_has_the_bytes_of_the_all_to_all,
    rounds_have_the_bytes_of_one_round,
)
