"""The differentiable product as a user calls it: one function for each thing that the frontends are asked."""

from collections.abc import Callable
from typing import Any

import jax
from mxep import jax_frontend, torch_frontend
from mxep.core_kernels.recipe import Recipe
from torch import Tensor


def torch_product(x: Tensor, w: Tensor, ends: Tensor, recipe: Recipe) -> Tensor:
    """x (M, K), w (G, N, K) bf16 -> (M, N). Torch keeps the quantized weights from call to call."""
    return torch_frontend.mxfp8_grouped_mm(x, w.mT, ends, wgrad_with_hp=recipe.wgrad_with_hp, compute=recipe.compute)


def jax_weights(w: jax.Array, recipe: Recipe) -> jax_frontend.QuantizedWeights:
    """Weights (G, N, K), quantized once for many products."""
    return jax_frontend.quantize_weights(w, recipe=recipe)


def jax_product(x: jax.Array, weights: Any, ends: jax.Array, recipe: Recipe) -> Any:
    """x (M, K), what `jax_weights` made -> (M, N); groups of whole blocks."""
    return jax_frontend.mxfp8_grouped_mm(x, weights, ends, recipe=recipe, pad_token_groups=False)


def jax_autograd(
    x: jax.Array, w: jax.Array, ends: jax.Array, dout: jax.Array, recipe: Recipe
) -> tuple[Callable[..., tuple[jax.Array, ...]], tuple[Any, ...]]:
    """Compiled forward, input gradient and weight gradient, and its arguments: the weights are quantized outside."""

    def step(x: jax.Array, weights: Any, ends: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(lambda x, weights: jax_product(x, weights, ends, recipe), x, weights)
        gradients = jax.tree.leaves(vjp(dout))
        return (out, *(g for g in gradients if g.dtype != jax.dtypes.float0))  # bytes have none

    arguments = (x, jax_weights(w, recipe), ends, dout)
    return jax.jit(step).lower(*arguments).compile(), arguments
