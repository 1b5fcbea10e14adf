"""The three products of a linear layer per group of rows, and the formats of their operands.

    out = x w^T       row operand x row operand        format: the recipe's form
    dx  = dout w      row operand x row operand
    dw  = dout^T x    token operand x token operand    bf16, or the form along the tokens (recipe "mxfp8")

    form      row operand                   token operand, transposed
    "bf16"    bf16                          bf16
    "mx"      (q, sf), one sf per 32        (q_t, sf_t), one sf per 32
    "fold"    (q, sf), one sf per row       (q_t, sf), one sf per feature and chunk of 256 tokens
    "row"     (q, sf), one sf per row       bf16
    "block"   (q, sf), one fp32 sf per 128  bf16                   and per 128 x 128 of weights

Transport and the backward's residuals hold MX bytes; this file folds them directly before the product. With form
"fold", one read of a bf16 or fp32 activation produces both of its operands, and the backward keeps the token operand in
place of the activation: half of the memory. MX rows become a token operand in one pass. Rows that a map gathers from
packed ones become either operand in one pass, and are not stored themselves. Hopper's tensor cores take no scales per
32, so form "mx" there dequantizes an operand once and multiplies bf16. This code runs below autodiff: no checks, no
gradients; recipes come from `resolve_compute`. Weights and their gradient are (G, N, K), as a linear layer stores them,
or (G, K, N) with layout="GKN".
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.formats import GRADIENT_HEADROOM
from ..core_kernels.recipe import Recipe
from . import ops
from ._call import rounded
from .mx_array import MXArray
from .weights import (
    KN,
    MX,
    Blockwise,
    Folded,
    Layout,
    Quantized,
    Upcast,
    Weights,
    along_k,
    along_n,
    as_multiplied,
    form_of,
    mx_rows,
    quantize_rows,
)

Multiplied = jax.Array | Quantized
Rows = MXArray | Multiplied
Tokens = Multiplied


def product(
    x: Rows, w: Weights, group_ends: jax.Array, recipe: Recipe, out_dtype="bfloat16", layout: Layout = "GNK",
    bias: jax.Array | None = None, row_weights: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """x (M, K) x w (G, N, K) [+ row_weights (M,) bias (G, N), fp32], rounded once -> (M, N); rows past the last end are
    zeros."""
    operands = row_operand(x, recipe), along_k(w, recipe, layout)
    return _plus_bias(*operands, group_ends, out_dtype, bias, row_weights)


def _plus_bias(
    rows: Multiplied, weights: Multiplied | KN, group_ends: jax.Array, out_dtype, bias: jax.Array | None,
    row_weights: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    if bias is None:
        return _multiply(rows, weights, group_ends, out_dtype)
    if isinstance(rows, Folded) and row_weights is None:
        assert isinstance(weights, Folded)
        return ops.grouped_mm_fold_bias(*rows, *weights, bias, group_ends, out_dtype=out_dtype)
    sums = _multiply(rows, weights, group_ends, "float32")  # the other kernels take no bias
    added = bias_of_rows(bias, group_ends, sums.shape[0])
    if row_weights is not None:
        in_group = jnp.arange(sums.shape[0]) < group_ends[-1:]
        added = added * jnp.where(in_group, row_weights, 0)[:, None]
    return (sums + added).astype(out_dtype)


def pair_of_products(
    x: Rows, w: Weights, w2: Weights, group_ends: jax.Array, recipe: Recipe,
    biases: tuple[jax.Array | None, jax.Array | None],
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`product` of the same rows with two weights of one shape, in bf16; folded ones without biases in one launch."""
    rows, weights, weights2 = row_operand(x, recipe), along_k(w, recipe), along_k(w2, recipe)
    if biases == (None, None) and isinstance(rows, Folded) and isinstance(weights, Folded):
        assert isinstance(weights2, Folded)
        return ops.grouped_mm_fold_pair(*rows, *weights, *weights2, group_ends, out_dtype="bfloat16")
    first = _plus_bias(rows, weights, group_ends, "bfloat16", biases[0])
    return first, _plus_bias(rows, weights2, group_ends, "bfloat16", biases[1])


def input_gradient(
    dout: Rows, w: Weights, group_ends: jax.Array, recipe: Recipe, out_dtype, layout: Layout = "GNK"
) -> jax.Array:
    """dout (M, N) x w -> dx (M, K)."""
    return _plus_bias(row_operand(dout, recipe), along_n(w, recipe, layout), group_ends, out_dtype, None)


def sum_of_input_gradients(
    dgate: Rows, w1: Weights, dup: Rows, w3: Weights, group_ends: jax.Array, recipe: Recipe, out_dtype
) -> jax.Array:
    """dgate x w1 + dup x w3, rounded once -> dx (M, K).

    Folded rows have the bytes of swiglu_bwd_fold, whichever op quantizes them.
    """
    rows, rows2 = (row_operand(x, recipe, GRADIENT_HEADROOM) for x in (dgate, dup))
    weights, weights2 = along_n(w1, recipe), along_n(w3, recipe)
    if isinstance(rows, Folded):
        assert isinstance(weights, Folded)
        assert isinstance(rows2, Folded)
        assert isinstance(weights2, Folded)
        return ops.grouped_mm_fold_sum(*rows, *weights, *rows2, *weights2, group_ends, out_dtype=out_dtype)
    if isinstance(weights, KN):
        assert isinstance(weights2, KN)
        return ops.grouped_mm_bf16_kn_sum(rows, *weights, rows2, *weights2, group_ends, out_dtype=out_dtype)
    first = _multiply(rows, weights, group_ends, "float32")
    total = first + _multiply(rows2, weights2, group_ends, "float32")
    return rounded(total, out_dtype)


def weight_gradient(dout: Tokens, x: Tokens, group_ends: jax.Array, out_dtype, layout: Layout = "GNK") -> jax.Array:
    """dout (M, N) and x (M, K), both from `token_operand` -> dw."""
    a, b = (dout, x) if layout == "GNK" else (x, dout)
    if isinstance(a, jax.Array):
        assert isinstance(b, jax.Array)
        return ops.grouped_wgrad_bf16(a, b, group_ends, out_dtype=out_dtype)
    if isinstance(a, Upcast):
        assert isinstance(b, Upcast)
        return ops.grouped_wgrad_bf16_t(*a, *b, group_ends, out_dtype=out_dtype)
    assert not isinstance(b, jax.Array | Upcast)
    multiply = ops.grouped_wgrad_fold if isinstance(a, Folded) else ops.grouped_wgrad_mx
    return multiply(*a, *b, group_ends, out_dtype=out_dtype)


def pair_of_weight_gradients(
    dout: Tokens, dout2: Tokens, x: Tokens, group_ends: jax.Array, out_dtypes: tuple
) -> tuple[jax.Array, jax.Array]:
    """`weight_gradient` of two gradients with the same x; folded ones in one launch."""
    if isinstance(dout, Folded) and out_dtypes[0] == out_dtypes[1]:
        assert isinstance(dout2, Folded)
        assert isinstance(x, Folded)
        return ops.grouped_wgrad_fold_pair(*dout, *x, *dout2, group_ends, out_dtype=out_dtypes[0])
    first = weight_gradient(dout, x, group_ends, out_dtypes[0])
    return first, weight_gradient(dout2, x, group_ends, out_dtypes[1])


def _multiply(rows: Multiplied, weights: Multiplied | KN, group_ends, out_dtype) -> jax.Array:
    if isinstance(weights, KN):
        return ops.grouped_mm_bf16_kn(rows, *weights, group_ends, out_dtype=out_dtype)
    if isinstance(rows, jax.Array):
        assert isinstance(weights, jax.Array)
        return ops.grouped_mm_bf16(rows, weights, group_ends, out_dtype=out_dtype)
    assert not isinstance(weights, jax.Array)
    if isinstance(rows, Blockwise):
        assert isinstance(weights, Blockwise)
        return ops.grouped_mm_blockwise(*rows, *weights, group_ends, out_dtype=out_dtype)
    # QuantizedWeights may be for another device than this program: an Upcast on one side makes the product bf16.
    if isinstance(rows, Upcast) or isinstance(weights, Upcast):
        assert not isinstance(rows, Folded)
        assert not isinstance(weights, Folded)
        return ops.grouped_mm_bf16(as_bf16(rows), as_bf16(weights), group_ends, out_dtype=out_dtype)
    multiply = ops.grouped_mm_fold if isinstance(rows, Folded) else ops.grouped_mm_mx
    return multiply(*rows, *weights, group_ends, out_dtype=out_dtype)


def bias_of_rows(bias: jax.Array, group_ends: jax.Array, rows: int) -> jax.Array:
    """bias (G, N) -> (rows, N), the bias of each row's group; zeros past the last end."""
    row = jnp.arange(rows, dtype=group_ends.dtype)
    group = (row[:, None] >= group_ends).sum(1, dtype=jnp.int32)  # not jnp.searchsorted, see ep.lay_out
    return jnp.pad(bias, ((0, 1), (0, 0)))[group]


def bias_gradient(dout: jax.Array | MX, group_ends: jax.Array, row_weights: jax.Array | None = None) -> jax.Array:
    """dout (M, N) -> (G, N) fp32, the sum of each group's rows, computed as the product of dout^T and ones or
    row_weights (M,) fp32.

    An fp32 dout is the sum of two bf16 numbers, which leaves out 2^-17 of each value.
    """
    high = as_bf16(dout)
    parts = [high]
    if isinstance(dout, jax.Array) and dout.dtype == jnp.float32:
        # XLA may remove a conversion to bf16 and back, but not reduce_precision.
        kept = lax.reduce_precision(dout, 8, 7)
        parts.append(as_bf16(jnp.where(jnp.isfinite(kept), dout - kept, 0)))
    if row_weights is None:
        ones = jnp.ones_like(high[:, :8])
        sums = [ops.grouped_wgrad_bf16(part, ones, group_ends, out_dtype="float32")[..., 0] for part in parts]
        return jnp.stack(sums).sum(0)
    columns = _in_thirds(row_weights).T
    sums = [ops.grouped_wgrad_bf16(part, columns, group_ends, out_dtype="float32") for part in parts]
    return jnp.stack(sums).sum((0, -1))


def bias_row_products(dout: jax.Array | MX, bias: jax.Array, group_ends: jax.Array) -> jax.Array:
    """dout (M, N), bias (G, N) fp32 -> (M,) fp32, the product of each row and the bias of its group; zeros past the
    last end."""
    thirds = _in_thirds(bias.reshape(-1)).reshape(8, *bias.shape).swapaxes(0, 1)
    return ops.grouped_mm_bf16(as_bf16(dout), thirds, group_ends, out_dtype="float32").sum(-1)


def _in_thirds(x: jax.Array) -> jax.Array:
    """fp32 (n,) -> (8, n) bf16, three rows of 8 bits each, whose sum is x, and zeros: the kernels take 8."""
    high = lax.reduce_precision(x, 8, 7)  # XLA may remove a conversion to bf16 and back
    rest = jnp.where(jnp.isfinite(high), x - high, 0)
    middle = lax.reduce_precision(rest, 8, 7)
    return jnp.stack([high, middle, rest - middle, *[jnp.zeros_like(x)] * 5]).astype(jnp.bfloat16)


def row_operand(x: Rows, recipe: Recipe, headroom: int = 0) -> Multiplied:
    """x along its rows in the recipe's form. Quantized operands but MX are returned unchanged.

    headroom: of a fold; rows through a map have none.
    """
    if isinstance(x, Folded | Blockwise | Upcast):
        return x
    if form_of(recipe) == "bf16":
        return as_bf16(x)
    if isinstance(x, MXArray):
        source = _source(x, recipe)
        if source is not None:
            return Folded(*ops.permute_mx_fold(*source))
        x = (x.q, x.sf)
    if isinstance(x, tuple) and not recipe.mx:
        x = as_bf16(x)
    if not isinstance(x, tuple):
        return quantize_rows(x, recipe, headroom)
    return mx_rows(x, recipe, headroom)


def _source(x: MXArray, recipe: Recipe) -> tuple[jax.Array, jax.Array] | None:
    """The packed rows and the row map of which both operands of x are made; None: they are made of q and sf."""
    return x.source if recipe.wgrad_mx and form_of(recipe) == "fold" else None


def for_backward(x: Rows, recipe: Recipe) -> Rows:
    """x with what `token_operand` reads of it."""
    if not isinstance(x, MXArray):
        return x
    if _source(x, recipe) is None:
        return dataclasses.replace(x, source=None)
    return dataclasses.replace(x, q=None, sf=None)


def as_bf16(x: jax.Array | MXArray | MX | Upcast) -> jax.Array:
    """x in bf16, rounded if bf16 does not hold its values."""
    if isinstance(x, Upcast):
        return x.x
    if isinstance(x, tuple):
        return ops.dequantize(*x, out_dtype="bfloat16")
    return as_bf16((x.q, x.sf)) if isinstance(x, MXArray) else x.astype(jnp.bfloat16)


def quantize_activation(x: Rows, group_ends: jax.Array, recipe: Recipe) -> tuple[Rows, Folded | None]:
    """Return (row operand, token operand) of x, both from one read.

    The token operand is None if x is MX already or the weight gradient does not fold.
    """
    if not (recipe.wgrad_mx and form_of(recipe) == "fold" and isinstance(x, jax.Array)):
        return row_operand(x, recipe), None
    qf, row_sf, qf_t, chunk_sf = ops.quantize_both_fold(x, group_ends, rounding=recipe.rounding)
    return Folded(qf, row_sf), Folded(qf_t, chunk_sf)


def token_operand(x: jax.Array | MXArray | MX, group_ends: jax.Array, recipe: Recipe) -> Tokens:
    """The operand of the weight gradient: x in bf16, or x (M, K) quantized along the tokens, transposed."""
    if not recipe.wgrad_mx:
        return as_bf16(x)
    source = _source(x, recipe) if isinstance(x, MXArray) else None
    if source is not None:
        return Folded(*ops.permute_mx_col_fold(*source, group_ends, rounding=recipe.rounding))
    if form_of(recipe) == "fold" and isinstance(x, MXArray | tuple):
        q, sf = (x.q, x.sf) if isinstance(x, MXArray) else x
        return Folded(*ops.requantize_col_fold(q, sf, group_ends, rounding=recipe.rounding))
    values = x.dequantize() if isinstance(x, MXArray) else as_bf16(x) if isinstance(x, tuple) else x
    return along_tokens(ops.quantize_col(values, rounding=recipe.rounding), group_ends, recipe)


def along_tokens(pair: MX, group_ends: jax.Array, recipe: Recipe) -> Quantized:
    """q (K, M) and sf along the tokens, in the recipe's form."""
    return Folded(*ops.fold_groups(*pair, group_ends)) if form_of(recipe) == "fold" else as_multiplied(pair)


def output_gradient_operands(dout: jax.Array | MX, group_ends: jax.Array, recipe: Recipe) -> tuple[Rows, Tokens]:
    """Return (row operand, token operand) of dout."""
    if recipe.wgrad_mx and form_of(recipe) == "mx" and isinstance(dout, jax.Array):
        q, sf, q_t, sf_t = ops.quantize_both(dout, rounding=recipe.rounding)  # one read for both products
        return (q, sf), along_tokens((q_t, sf_t), group_ends, recipe)
    rows, tokens = quantize_activation(dout, group_ends, recipe)
    return rows, tokens or token_operand(dout, group_ends, recipe)
