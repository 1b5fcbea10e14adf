"""The three products of a linear layer per group of rows, and the forms in which their operands come.

    out  = lhs rhs          rows      as the form says
    dlhs = dout rhs^T       rows      as the form says
    drhs = lhs^T dout       tokens    bf16, or along the tokens as the form says (recipe "mxfp8")

    form      rows                        tokens, transposed
    "bf16"    bf16                        bf16
    "mx"      q, sf: one per 32           q, sf: one per 32
    "fold"    q, sf: one per row          q, sf: one per row and span of 256 tokens
    "row"     q, sf: one per row          bf16

MXFP8 is folded here, at the last moment: what travels and what is saved for the backward is not. What is bf16 or fp32
becomes both folded operands in one read of it, and a backward keeps those of the tokens instead of it: half of the
memory. Hopper's tensor cores take no scales per 32: there form "mx" multiplies dequantized bf16, and what is
dequantized here serves all of its products. For code below autodiff: no checks, no gradients; recipes are `settled`.
Weights and their gradient are (G, N, K), as a linear layer stores them, or (G, K, N) with stored="kn".
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.recipe import Recipe
from . import ops
from .mx_array import MXArray
from .weights import (
    Folded,
    Pair,
    Quantized,
    Stored,
    Upcast,
    Weights,
    along_k,
    along_n,
    as_multiplied,
    form_of,
    quantized,
)

Multiplied = jax.Array | Quantized
Rows = MXArray | Multiplied
Tokens = Multiplied


def rows_of(x: Rows, recipe: Recipe) -> Multiplied:
    """x along its rows, in the form that the recipe multiplies; a Folded or Upcast as it is."""
    if isinstance(x, Folded | Upcast):
        return x
    if form_of(recipe) == "bf16":
        return as_bf16(x)
    if isinstance(x, MXArray):
        x = (x.q, x.sf)
    if isinstance(x, tuple) and form_of(recipe) == "row":
        x = as_bf16(x)
    if not isinstance(x, tuple):
        return quantized(x, recipe)
    return Folded(*ops.fold_rows(*x)) if form_of(recipe) == "fold" else as_multiplied(x)


def as_bf16(x: jax.Array | MXArray | Pair | Upcast) -> jax.Array:
    """bf16, of the same values as far as that holds them."""
    if isinstance(x, Upcast):
        return x.x
    if isinstance(x, tuple):
        return ops.dequantize(*x, out_dtype="bfloat16")
    return as_bf16((x.q, x.sf)) if isinstance(x, MXArray) else x.astype(jnp.bfloat16)


def product(
    lhs: Rows, rhs: Weights, group_ends: jax.Array, recipe: Recipe, out_dtype="bfloat16", stored: Stored = "nk",
    bias: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """lhs (M, K) x rhs [+ bias (G, N) fp32], rounded once -> (M, N), as the recipe multiplies."""
    rows, weights = rows_of(lhs, recipe), along_k(rhs, recipe, stored)
    if bias is None:
        return _multiply(rows, weights, group_ends, out_dtype)
    if isinstance(rows, Folded):
        assert isinstance(weights, Folded)
        return ops.grouped_mm_fold_bias(*rows, *weights, bias, group_ends, out_dtype=out_dtype)
    sums = _multiply(rows, weights, group_ends, "float32")  # the other products take none: added to their sums
    return (sums + bias_of_rows(bias, group_ends, sums.shape[0])).astype(out_dtype)


def bias_of_rows(bias: jax.Array, group_ends: jax.Array, rows: int) -> jax.Array:
    """bias (G, N) -> (rows, N): each row's group's; zeros past the last end."""
    row = jnp.arange(rows, dtype=group_ends.dtype)
    group = (row[:, None] >= group_ends).sum(1, dtype=jnp.int32)  # not jnp.searchsorted: ep.py's plan_exchange says why
    return jnp.pad(bias, ((0, 1), (0, 0)))[group]


def bias_gradient(dout: jax.Array | Pair, group_ends: jax.Array) -> jax.Array:
    """dout (M, N) -> (G, N) fp32: each group's sum of rows, as the product of dout^T and ones.

    fp32 is summed as two bf16 numbers, which leave out 2^-17 of it.
    """
    high = as_bf16(dout)
    parts = [high]
    if isinstance(dout, jax.Array) and dout.dtype == jnp.float32:
        # Said explicitly: of a conversion to bf16 and back, XLA may leave nothing.
        kept = lax.reduce_precision(dout, 8, 7)
        parts.append(as_bf16(jnp.where(jnp.isfinite(kept), dout - kept, 0)))
    ones = jnp.ones_like(high[:, :8])
    sums = [ops.grouped_wgrad_bf16(part, ones, group_ends, out_dtype="float32")[..., 0] for part in parts]
    return jnp.stack(sums).sum(0)


def input_gradient(
    dout: Rows, rhs: Weights, group_ends: jax.Array, recipe: Recipe, out_dtype, stored: Stored = "nk"
) -> jax.Array:
    """dout (M, N) x rhs -> dlhs (M, K), as the recipe multiplies."""
    return _multiply(rows_of(dout, recipe), along_n(rhs, recipe, stored), group_ends, out_dtype)


def _multiply(rows: Multiplied, weights: Multiplied, group_ends, out_dtype) -> jax.Array:
    if isinstance(rows, jax.Array):
        assert isinstance(weights, jax.Array)
        return ops.grouped_mm_bf16(rows, weights, group_ends, out_dtype=out_dtype)
    assert not isinstance(weights, jax.Array)
    # Weights may have been quantized for another device than this program is for.
    if isinstance(rows, Upcast) or isinstance(weights, Upcast):
        assert not isinstance(rows, Folded)
        assert not isinstance(weights, Folded)
        return ops.grouped_mm_bf16(as_bf16(rows), as_bf16(weights), group_ends, out_dtype=out_dtype)
    multiply = ops.grouped_mm_fold if isinstance(rows, Folded) else ops.grouped_mm_mx
    return multiply(*rows, *weights, group_ends, out_dtype=out_dtype)


def activation(x: Rows, group_ends: jax.Array, recipe: Recipe) -> tuple[Rows, Folded | None]:
    """x along its rows and, from the same read of x, along the tokens; None there where x is MX already or the weight
    gradient does not fold."""
    if not (recipe.wgrad_mx and form_of(recipe) == "fold" and isinstance(x, jax.Array)):
        return rows_of(x, recipe), None
    qf, row_sf, qf_t, span_sf = ops.quantize_both_fold(x, group_ends, rounding=recipe.rounding)
    return Folded(qf, row_sf), Folded(qf_t, span_sf)


def tokens_of(x: jax.Array | MXArray | Pair, group_ends: jax.Array, recipe: Recipe) -> Tokens:
    """What a weight gradient multiplies: bf16, or x (M, K) quantized along the tokens, transposed."""
    if not recipe.wgrad_mx:
        return as_bf16(x)
    values = x.dequantize() if isinstance(x, MXArray) else as_bf16(x) if isinstance(x, tuple) else x
    return along_tokens(ops.quantize_col(values, rounding=recipe.rounding), group_ends, recipe)


def along_tokens(pair: Pair, group_ends: jax.Array, recipe: Recipe) -> Quantized:
    """q (K, M) and sf along the tokens, in the form that the recipe multiplies."""
    return Folded(*ops.fold_groups(*pair, group_ends)) if form_of(recipe) == "fold" else as_multiplied(pair)


def gradient_operands(dout: jax.Array | Pair, group_ends: jax.Array, recipe: Recipe) -> tuple[Rows, Tokens]:
    """What the input gradient multiplies, and what the weight gradient does."""
    if recipe.wgrad_mx and form_of(recipe) == "mx" and isinstance(dout, jax.Array):
        q, sf, q_t, sf_t = ops.quantize_both(dout, rounding=recipe.rounding)  # one read for both products
        return (q, sf), along_tokens((q_t, sf_t), group_ends, recipe)
    rows, tokens = activation(dout, group_ends, recipe)
    return rows, tokens or tokens_of(dout, group_ends, recipe)


def weight_gradient(dout: Tokens, lhs: Tokens, group_ends: jax.Array, out_dtype, stored: Stored = "nk") -> jax.Array:
    """dout (M, N) and lhs (M, K), as `tokens_of` made them -> drhs."""
    a, b = (dout, lhs) if stored == "nk" else (lhs, dout)
    if isinstance(a, jax.Array):
        assert isinstance(b, jax.Array)
        return ops.grouped_wgrad_bf16(a, b, group_ends, out_dtype=out_dtype)
    if isinstance(a, Upcast):
        assert isinstance(b, Upcast)
        return ops.grouped_wgrad_bf16_t(*a, *b, group_ends, out_dtype=out_dtype)
    assert not isinstance(b, jax.Array | Upcast)
    multiply = ops.grouped_wgrad_fold if isinstance(a, Folded) else ops.grouped_wgrad_mx
    return multiply(*a, *b, group_ends, out_dtype=out_dtype)
