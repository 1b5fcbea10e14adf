"""The three products of a linear layer per group of rows, and the forms in which their operands come.

    out  = lhs rhs          rows      (q, sf) along the rows, or bf16
    dlhs = dout rhs^T       rows      (q, sf) along the rows, or bf16
    drhs = lhs^T dout       tokens    (q, sf) along the tokens, or bf16

For code below autodiff: no checks, no gradients. `rhs_t` and its gradient are (G, N, K), as a linear layer stores
them.
"""

import jax
import jax.numpy as jnp

from ..core_kernels.recipe import Recipe
from . import ops
from .mx_array import MXArray

Pair = tuple[jax.Array, jax.Array]
"""q and sf, in the order that a product reads them."""
Rows = jax.Array | MXArray | Pair


def rows_of(x: Rows, recipe: Recipe) -> Pair:
    """Quantized along the rows, unless it already is."""
    if isinstance(x, tuple):
        return x
    return (x.q, x.sf) if isinstance(x, MXArray) else ops.quantize_row(x, rounding=recipe.rounding)


def as_bf16(x: Rows) -> jax.Array:
    """bf16, of the same values as far as that holds them."""
    if isinstance(x, tuple):
        return ops.dequantize(*x, out_dtype="bfloat16")
    return as_bf16((x.q, x.sf)) if isinstance(x, MXArray) else x.astype(jnp.bfloat16)


def product(lhs: Rows, rhs_t: jax.Array, group_ends: jax.Array, recipe: Recipe, out_dtype="bfloat16") -> jax.Array:
    """lhs (M, K) x rhs_t (G, N, K) -> (M, N), as the recipe multiplies."""
    if not recipe.mx:
        return ops.grouped_mm_bf16(as_bf16(lhs), as_bf16(rhs_t), group_ends, out_dtype=out_dtype)
    weights = ops.quantize_row(rhs_t, rounding=recipe.rounding)
    return ops.grouped_mm_mx(*rows_of(lhs, recipe), *weights, group_ends, out_dtype=out_dtype)


def tokens_of(x: Rows, recipe: Recipe) -> jax.Array | Pair:
    """What a weight gradient multiplies: bf16, or x (M, K) quantized along the tokens, transposed."""
    if not recipe.wgrad_mx:
        return as_bf16(x)
    values = x.dequantize() if isinstance(x, MXArray) else as_bf16(x) if isinstance(x, tuple) else x
    return ops.quantize_col(values, rounding=recipe.rounding)


def gradient_operands(dout: Rows, recipe: Recipe) -> tuple[Rows, jax.Array | Pair]:
    """What the input gradient multiplies, and what the weight gradient does."""
    if recipe.wgrad_mx and isinstance(dout, jax.Array):
        q, sf, q_t, sf_t = ops.quantize_both(dout, rounding=recipe.rounding)  # one read for both products
        return (q, sf), (q_t, sf_t)
    return rows_of(dout, recipe) if recipe.mx else as_bf16(dout), tokens_of(dout, recipe)


def input_gradient(dout: Rows, rhs_t: jax.Array, group_ends: jax.Array, recipe: Recipe, out_dtype) -> jax.Array:
    """dout (M, N) x rhs_t (G, N, K) -> dlhs (M, K)."""
    if not recipe.mx:
        return ops.grouped_mm_bf16(as_bf16(dout), as_bf16(rhs_t).mT, group_ends, out_dtype=out_dtype)
    weights = ops.quantize_col(rhs_t, rounding=recipe.rounding)
    return ops.grouped_mm_mx(*rows_of(dout, recipe), *weights, group_ends, out_dtype=out_dtype)


def weight_gradient(dout: jax.Array | Pair, lhs: jax.Array | Pair, group_ends: jax.Array, out_dtype) -> jax.Array:
    """dout (M, N) and lhs (M, K), as `tokens_of` made them -> drhs_t (G, N, K)."""
    if isinstance(dout, tuple) and isinstance(lhs, tuple):
        return ops.grouped_wgrad_mx(*dout, *lhs, group_ends, out_dtype=out_dtype)
    return ops.grouped_wgrad_bf16(as_bf16(dout), as_bf16(lhs), group_ends, out_dtype=out_dtype)
