"""The differentiable grouped product as a user calls it: forward and both gradients, from bf16.

Weights (G, N, K) are quantized in every call; `held` weights are quantized once, before. Group ends are multiples of
32, so nothing is padded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import torch
from mxep import jax_frontend, torch_frontend
from mxep.core_kernels.grouped_gemm.cases import Product
from mxep.core_kernels.policy.recipe import Recipe
from mxep.jax_frontend.products import weights as weights_of_jax
from mxep.torch_frontend.products import weights as weights_of_torch
from torch import Tensor

from ...peers import grouped_gemm as products
from ...peers.grouped_gemm import BF16
from ..case import Tensors
from ..error_check import Error, sqnr_db
from .grouped_gemm_case import Compiled, Operands, ProductCase, dense_products, pair

RECIPES = ("mxfp8", "mxfp8_wgrad_with_hp")
MIN_SQNR_DB = 25.2  # every output, MXFP8 against bf16, on the values of `operands`: at least 28.2 measured, less 3


def torch_weights(w: Tensor, recipe: Recipe) -> weights_of_torch.QuantizedWeights:
    return torch_frontend.quantize_weights(w, recipe)


def torch_product(x: Tensor, w: "Tensor | weights_of_torch.QuantizedWeights", ends: Tensor, recipe: Recipe) -> Tensor:
    """x (M, K) bf16 -> (M, N)."""
    return torch_frontend.grouped_mm(x, w, ends, recipe=recipe, pad_token_groups=False)


def jax_weights(w: jax.Array, recipe: Recipe) -> weights_of_jax.QuantizedWeights:
    return jax_frontend.quantize_weights(w, recipe=recipe)


def jax_product(x: jax.Array, w: Any, ends: jax.Array, recipe: Recipe) -> Any:
    """x (M, K) bf16 -> (M, N)."""
    return jax_frontend.grouped_mm(x, w, ends, recipe=recipe, pad_token_groups=False)


def jax_autograd(
    x: jax.Array, w: jax.Array, ends: jax.Array, dout: jax.Array, recipe: Recipe, held: bool
) -> tuple[Callable[..., tuple[jax.Array, ...]], tuple[Any, ...]]:
    """Forward, input gradient and weight gradient, compiled, and the arguments."""

    def step(x: jax.Array, weights: Any, ends: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        out, vjp = jax.vjp(lambda x, weights: jax_product(x, weights, ends, recipe), x, weights)
        gradients = jax.tree.leaves(vjp(dout))
        return (out, *(g for g in gradients if g.dtype != jax.dtypes.float0))  # quantized bytes have no gradient

    arguments = (x, jax_weights(w, recipe) if held else w, ends, dout)
    return jax.jit(step).lower(*arguments).compile(), arguments


def autograd(p: Product, o: Operands, recipe_name: str, held: bool) -> ProductCase:
    recipe = Recipe.parse(recipe_name, compute="fold")
    x, w = (t.detach().requires_grad_() for t in (o.x, o.w))  # the same memory; leaves of this case only
    with torch.no_grad():
        w.mul_(1)  # raises the version counter, as an optimizer does: FSDP2's gathered weights stay at 0
    weights = torch_weights(w, recipe) if held else w
    bf16 = partial(products.autograd, products.grouped_bf16, x, w, o.ends, o.dout)

    def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch_product(x, weights, ends, recipe)

    def check(outputs: Tensors) -> Error:
        db = sqnr_db(outputs, bf16(), o.ends)
        if not db >= MIN_SQNR_DB:
            raise AssertionError(f"{db} dB from bf16; expected {MIN_SQNR_DB} or more")
        return {"grade": "sqnr_db", "sqnr_db": db}

    def compiled() -> Compiled:
        arrays = tuple(map(jax.dlpack.from_dlpack, (o.x, o.w, o.ends, o.dout)))
        return jax_autograd(*arrays, recipe=recipe, held=held)

    a, b = (pair("quantize_row", t)[0] for t in (o.x, o.w[0]))
    return ProductCase(
        "grouped_mm_autograd", {**p._asdict(), "recipe": recipe_name, **({"weights": "held"} if held else {})},
        "grouped_mm_fold",
        flops=6 * p.M * p.N * p.K,
        read=sum(t.nbytes for t in o),
        run=partial(products.autograd, product, x, w, o.ends, o.dout),
        compiled=compiled,
        check=check,
        peers={BF16: bf16},
        ends=o.ends,
        dense_flops=2 * p.M * p.N * p.K,
        dense=dense_products(a, b, o.x, o.w[0]),
        same_bytes=False,
    )  # fmt: skip
