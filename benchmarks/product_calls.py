"""The differentiable product as a user calls it: one function for each thing that the frontends are asked.

Weights are (G, N, K) bf16, quantized in the call, or what `*_weights` made of them before: held for many calls. Group
ends are multiples of 32: nothing is padded.
"""

from collections.abc import Callable
from typing import Any

import jax
from mxep import jax_frontend, torch_frontend
from mxep.core_kernels.recipe import Recipe
from torch import Tensor


def torch_weights(w: Tensor, recipe: Recipe) -> torch_frontend.QuantizedWeights:
    return torch_frontend.quantize_weights(w, recipe)


def torch_product(x: Tensor, w: "Tensor | torch_frontend.QuantizedWeights", ends: Tensor, recipe: Recipe) -> Tensor:
    """x (M, K) bf16 -> (M, N)."""
    return torch_frontend.grouped_mm(x, w, ends, recipe=recipe, pad_token_groups=False)


def jax_weights(w: jax.Array, recipe: Recipe) -> jax_frontend.QuantizedWeights:
    return jax_frontend.quantize_weights(w, recipe=recipe)


def jax_product(x: jax.Array, w: Any, ends: jax.Array, recipe: Recipe) -> Any:
    """x (M, K) bf16 -> (M, N)."""
    return jax_frontend.grouped_mm(x, w, ends, recipe=recipe, pad_token_groups=False)


def jax_autograd(
    x: jax.Array, w: jax.Array, ends: jax.Array, dout: jax.Array, recipe: Recipe, held: bool
) -> tuple[Callable[..., tuple[jax.Array, ...]], tuple[Any, ...]]:
    """Compiled forward, input gradient and weight gradient, and its arguments."""

    def step(x: jax.Array, weights: Any, ends: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(lambda x, weights: jax_product(x, weights, ends, recipe), x, weights)
        gradients = jax.tree.leaves(vjp(dout))
        return (out, *(g for g in gradients if g.dtype != jax.dtypes.float0))  # bytes have none

    arguments = (x, jax_weights(w, recipe) if held else w, ends, dout)
    return jax.jit(step).lower(*arguments).compile(), arguments
