"""Layers of the table in JAX, what is compared of them, and the replay of one row.

Logits and gates are exact, as in torch_layers.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from mxep.core_kernels.policy.recipe import Recipe
from mxep.jax_frontend import MoEConfig, PeerMemory, RouterConfig, SharedExpert, moe, save_mx_rows

from .table import Row

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 96, 8, 2, 48
REPLAYS: dict[str, Callable[..., Any]] = {
    "checkpoint": jax.checkpoint,
    "save_mx_rows": partial(jax.checkpoint, policy=save_mx_rows),
    "names": partial(
        jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("mxep_gate", "mxep_up", "mxep_outputs")
    ),
}


def grid(*shape: int, seed: int, step: float, most: int) -> np.ndarray:
    """Multiples of `step`, at most `most` of them."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float32) * np.float32(step)


def config_of(row: Row) -> MoEConfig:
    """Without the transport, which `layer_of` adds."""
    exchange, extras = row["exchange"], row["extras"]
    _, _, how = exchange.partition("deduplicate ")
    recipe = Recipe.parse("mxfp8", compute="fold") if row["recipe"] == "folded" else Recipe.parse(row["recipe"])
    return MoEConfig(
        DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K, bias=extras == "biases", prob_in=row["prob_in"]),  # type: ignore[arg-type]
        recipe=recipe, bias=extras == "biases", deduplicate=how or None,  # type: ignore[arg-type]
        shared=SharedExpert(HIDDEN, gate=extras == "gated") if extras in ("shared", "gated") else None,
        capacity_factor=4 if exchange == "capacity" else None,
    )  # fmt: skip


def params_of(config: MoEConfig, dtype: str) -> moe.Params:
    params = moe.init(jax.random.key(0), config, jnp.dtype(dtype))
    for name in {"router", "router_bias", "shared_gate"} & params.keys():
        params[name] = jnp.asarray(grid(*params[name].shape, seed=len(name), step=1 / 16, most=8), dtype)
    for i, name in enumerate(sorted({"b1", "b2", "b3"} & params["experts"].keys())):
        params["experts"][name] = jax.random.normal(jax.random.key(i), params["experts"][name].shape, dtype)
    return params


def layer_of(config: MoEConfig, exchange: str, ranks: int) -> Callable[..., Any]:
    """(params, x) -> y, stats: on one device, or on ranks with a part of the tokens each."""
    if exchange == "one device":
        return partial(moe.apply, config=config)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("expert",))
    if exchange == "peer memory":
        config = replace(config, transport=PeerMemory(mesh, "expert"))
    return partial(moe.sharded_apply, config=config, tokens=P("expert"), mesh=mesh)


def step_of(layer: Callable[..., Any]) -> Callable[..., Any]:
    """y, stats and the gradients of params and x, of one program."""

    def step(params: moe.Params, x: jax.Array, dy: jax.Array) -> dict[str, Any]:
        def loss(params: moe.Params, x: jax.Array) -> Any:
            y, stats = layer(params, x)
            return (y * dy).sum(dtype=jnp.float32) + stats.aux_loss, (y, stats)

        grads, (y, stats) = jax.grad(loss, (0, 1), has_aux=True)(params, x)
        return {"y": y, "counts": stats.counts, "aux_loss": stats.aux_loss, "params": grads[0], "x": grads[1]}

    return jax.jit(step)


def same(got: Any, want: Any) -> None:
    named = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    others = [
        jax.tree_util.keystr(path) for (path, a), b in named if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]
    assert not others, others


def inputs(row: Row) -> tuple[jax.Array, jax.Array]:
    x = jnp.asarray(grid(TOKENS, DIM, seed=1, step=1 / 8, most=32), row["dtype"])
    return x, jax.random.normal(jax.random.key(2), x.shape, x.dtype)


def replay(row: Row, ranks: int) -> None:
    """The row's layer: run to run, and with a recomputed forward."""
    config = config_of(row)
    params, (x, dy) = params_of(config, row["dtype"]), inputs(row)
    layer = layer_of(config, row["exchange"], ranks)
    step = step_of(layer)
    want = step(params, x, dy)
    same(step(params, x, dy), want)
    same(step_of(REPLAYS[row["replay"]](layer))(params, x, dy), want)
