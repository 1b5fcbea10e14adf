"""The weighted sum of each token's top-k rows, differentiable in the rows and in the probabilities.

    rows (R, D), probs (T, K) --combine--> y (T, D)
    drows (R, D), dprobs (T, K) <--combine_bwd, combine_bwd_row-- dy (T, D), rows

    rows (R, D) --combine--> y (T, D)          without probabilities no row is saved: the gradient copies
    drows (R, D) <--gather-- dy (T, D)         each token's row to its slots

The gradient of an MXGradArray is MXFP8: drows is quantized, or without probabilities dy, before it is copied.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...core_kernels.formats import Rounding
from .. import ops
from ..ops.call import jitted, rounded
from ..ops.derivatives import arguments
from ..ops.mx_array import MXGradArray
from ..ops.remat import OUTPUTS, named
from ..products.gathers import HERE, Reader


class _Options(NamedTuple):
    """Dtypes of the rows and of the result; the rounding of an MXGradArray's gradient, None for an array; what reads
    the rows of an unweighted sum."""

    dtype: str
    out_dtype: str
    rounding: Rounding | None
    reader: Reader


def _sum_slots(rows: jax.Array, slots: jax.Array, reader: Reader = HERE) -> jax.Array:
    """y[t] = the fp32 sum over k of rows[slots[t, k]], rounded once to rows' dtype; for code below autodiff."""
    return reader.combine(rows, slots, rows.dtype)


sum_slots = jitted(_sum_slots, 2)


@jax.custom_vjp
def _weighed(x: jax.Array, probs: jax.Array) -> jax.Array:
    return rounded(x.astype(jnp.float32)[:, None] * probs[..., None], jnp.bfloat16)


def _weighed_bwd(residuals, grad):
    # In a loop with other ops XLA adds with other roundings. The barriers keep the sums in loops of their own: a
    # recomputed forward gives the same bits.
    x, probs, grad = jax.lax.optimization_barrier((*residuals, grad))
    grad = grad.astype(jnp.float32)
    dx = rounded((grad * probs[..., None]).sum(1), x.dtype)
    dprobs = (grad * x.astype(jnp.float32)[:, None]).sum(-1)
    return jax.lax.optimization_barrier((dx, dprobs))


_weighed.defvjp(lambda x, probs: (_weighed(x, probs), (x, probs)), _weighed_bwd)


def weigh_slots(x: jax.Array, probs: jax.Array) -> jax.Array:
    """A row per slot: x (T, D) times probs (T, K), computed in fp32 -> (T K, D) bf16."""
    return _weighed(*arguments("moe.apply", x, probs)).reshape(-1, x.shape[1])


def sum_of_slots(rows: jax.Array, top_k: int, out_dtype: Any) -> jax.Array:
    """rows (T K, D), one per slot -> (T, D), summed in fp32 and rounded once."""
    return rounded(rows.reshape(-1, top_k, rows.shape[1]).sum(1, dtype=jnp.float32), out_dtype)


def _sum(rows: jax.Array | MXGradArray, probs: jax.Array, slots: jax.Array, options: _Options) -> jax.Array:
    values = rows.value if isinstance(rows, MXGradArray) else rows
    return ops.combine(values, slots, probs, out_dtype=options.out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted(rows: Any, probs: jax.Array, slots: jax.Array, order: jax.Array, options: _Options) -> jax.Array:
    return _sum(rows, probs, slots, options)


def _weighted_fwd(rows, probs, slots, order, options):
    values = named(rows.value if isinstance(rows, MXGradArray) else rows, OUTPUTS)
    return _sum(rows, probs, slots, options), (values, probs, slots, order)


def _weighted_bwd(options, residuals, dy):
    rows, probs, slots, order = residuals
    if options.rounding is None:
        drows, dprobs = ops.combine_bwd(dy, rows, slots, order, probs)
        return drows, dprobs, None, None
    q, sf, dprobs = ops.combine_bwd_row(dy, rows, slots, order, probs, rounding=options.rounding)
    return MXGradArray.cotangent(None, (q, sf)), dprobs, None, None


_weighted.defvjp(_weighted_fwd, _weighted_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _plain(rows: Any, slots: jax.Array, order: jax.Array, options: _Options) -> jax.Array:
    values = rows.value if isinstance(rows, MXGradArray) else rows
    return options.reader.combine(values, slots, options.out_dtype)


def _plain_fwd(rows, slots, order, options):
    # Floor division keeps -1, padding, at -1.
    return _plain(rows, slots, order, options), order // slots.shape[1]


def _plain_bwd(options, token, dy):
    dy = dy.astype(options.dtype)
    if options.rounding is None:
        return options.reader.permute_rows(dy, token), None, None
    mx = options.reader.permute_mx(ops.quantize_row_packed(dy, rounding=options.rounding), token)
    return MXGradArray.cotangent(None, mx), None, None


_plain.defvjp(_plain_fwd, _plain_bwd)
_plain_jitted = jitted(_plain, 3)


def combine_slots(
    op: str,
    rows: jax.Array | MXGradArray,
    probs: jax.Array | None,
    slots: jax.Array,
    order: jax.Array,
    *,
    out_dtype: str,
    rounding: Rounding = Rounding.RCEIL,
    reader: Reader = HERE,
) -> jax.Array:
    """`rows.weighted_combine` for checked arguments; a reader of other ranks' rows, without probs."""
    quantized = isinstance(rows, MXGradArray)
    options = _Options(jnp.dtype(rows.dtype).name, out_dtype, rounding if quantized else None, reader)
    rows = rows.once(op) if isinstance(rows, MXGradArray) else rows
    if probs is None:
        return _plain_jitted(*arguments(op, rows, slots, order), options)
    return _weighted(*arguments(op, rows, probs, slots, order), options)
