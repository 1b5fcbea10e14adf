"""The layers of layers.py in JAX, on one device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from mxep.jax_frontend import MoEConfig, moe, save_mx_rows

from ..hashes import digits_of
from ..records import INPUTS, Case, Entry
from .layers import LAYERS, Layer

_PATHS = {"router.weight": ("router",), "router.bias": ("router_bias",), "shared_gate.weight": ("shared_gate",)}
"""Of parameters whose path in JAX is not their name in PyTorch."""


def cases() -> dict[str, Case]:
    return {f"jax layer {name}": Case("cpu_products", partial(entry, layer)) for name, layer in LAYERS.items()}


def config(layer: Layer, **options: Any) -> MoEConfig:
    return MoEConfig(*layer.sizes, **layer.arguments, **options)


def tree(layer: Layer) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for name, value in layer.parameters.items():
        if name != "selection_bias":
            *above, last = _PATHS.get(name, tuple(name.split(".")))
            (params.setdefault(above[0], {}) if above else params)[last] = jnp.asarray(value)
    return params


def named(results: Any) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(results)}


@partial(jax.jit, static_argnames=("of", "recompute"))
def _results(
    params: Any, x: jax.Array, dy: jax.Array, bias: Any, experts: Any, weights: Any, of: MoEConfig, recompute: bool
) -> Any:
    """As layers_torch.results."""

    def layer(params: Any, x: jax.Array, weights: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
        y, stats = moe.apply(params, x, of, experts=experts, weights=weights, selection_bias=bias)
        return (y, stats.aux_loss), stats

    layer = jax.checkpoint(layer, policy=save_mx_rows) if recompute else layer
    (y, aux_loss), backward, stats = jax.vjp(layer, params, x, weights, has_aux=True)
    grads, dx, dweights = backward((dy, jnp.ones_like(aux_loss)))
    return {"y": y, **stats._asdict(), "x": dx, "weights": dweights, **grads}


def entry(layer: Layer) -> Entry:
    arrays = (layer.x, layer.dy, layer.parameters.get("selection_bias"), *(layer.chosen or (None, None)))
    found = _results(tree(layer), *arrays, of=config(layer), recompute=layer.recompute)
    return {INPUTS: layer.digits, **{name: digits_of(value) for name, value in named(found).items()}}
