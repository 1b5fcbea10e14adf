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

from ..core_kernels.formats import Rounding
from ..core_kernels.launch import fail
from . import ops, peer_memory
from ._call import jitted, rounded
from ._checks import check_floats, check_integers, check_matrix, check_shape, dtype_name, rounding_of
from ._derivatives import arguments
from ._shapes import Float, Float32, Int
from .mx_array import MXGradArray
from .peer_memory import Across
from .remat import OUTPUTS, named


class _Options(NamedTuple):
    """Dtypes of the rows and of the result; the rounding of an MXGradArray's gradient, None for an array; the mesh axes
    along which slots and order lead."""

    dtype: str
    out_dtype: str
    rounding: Rounding | None
    across: Across


def _sum_slots(rows: jax.Array, slots: jax.Array, across: Across = None) -> Float[jax.Array, "T D"]:
    """y[t] = the fp32 sum over k of rows[slots[t, k]], rounded once to rows' dtype; for code below autodiff."""
    return peer_memory.combine(rows, slots, rows.dtype, across)


sum_slots = jitted(_sum_slots, 2)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _widened(x: jax.Array, dtype: str) -> jax.Array:
    """x of the dtype in fp32; its gradient is rounded here."""
    return x.astype(jnp.float32)


_widened.defvjp(lambda x, dtype: (_widened(x, dtype), None), lambda dtype, _, grad: (rounded(grad, dtype),))


def weigh_slots(x: jax.Array, probs: jax.Array) -> jax.Array:
    """A row per slot: x (T, D) times probs (T, K), computed in fp32 -> (T K, D) bf16."""
    wide: jax.Array = _widened(x, x.dtype.name)
    return rounded((wide[:, None] * probs[..., None]).reshape(-1, x.shape[1]), jnp.bfloat16)


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
    return peer_memory.combine(values, slots, options.out_dtype, options.across)


def _plain_fwd(rows, slots, order, options):
    # Floor division keeps -1, padding, at -1.
    return _plain(rows, slots, order, options), order // slots.shape[1]


def _plain_bwd(options, token, dy):
    dy = dy.astype(options.dtype)
    if options.rounding is None:
        return peer_memory.permute_rows(dy, token, options.across), None, None
    mx = peer_memory.permute_mx(ops.quantize_row_packed(dy, rounding=options.rounding), token, options.across)
    return MXGradArray.cotangent(None, mx), None, None


_plain.defvjp(_plain_fwd, _plain_bwd)
_plain_jitted = jitted(_plain, 3)


def weighted_combine(
    rows: Float[jax.Array, "R D"] | MXGradArray,
    probs: Float32[jax.Array, "T K"] | None,
    slots: Int[jax.Array, "T K"],
    order: Int[jax.Array, " R"],
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    rounding: Rounding | str = Rounding.RCEIL,
    across: Across = None,
) -> Float[jax.Array, "T D"]:
    """y[t] = sum over k of probs[t, k] * rows[slots[t, k]], summed in fp32, k ascending, and rounded once.

    rows: (R, D) bf16 or fp32, or an MXGradArray, whose gradient is quantized with `rounding`. probs: (T, K) float32, or
    None for an unweighted sum, which saves no rows for its gradient. slots: (T, K), the row of each slot, -1 for none.
    order: (R,), the map back: the slot t * K + k of each row, -1 for padding, whose gradient is zeros; both int32.
    out_dtype: bf16 or fp32; None is the dtype of rows. across: mesh axes of the enclosing shard_map, without probs: row
    r of rank q has the number q R + r in slots, and slot s of rank q the number q T K + s in order.
    Returns (T, D). The gradients have their argument's dtype,
    that of an MXGradArray is MXFP8.

    >>> slots, order = jnp.array([[1, 0]]), jnp.array([1, 0])
    >>> weighted_combine(jnp.array([[1.0], [2.0]]), jnp.array([[0.5, 0.25]]), slots, order).tolist()
    [[1.25]]

    Raises ValueError (shapes) and TypeError (dtypes).
    """
    op, rounding = "weighted_combine", rounding_of("weighted_combine", "rounding", rounding)
    if not isinstance(rows, MXGradArray):
        check_floats(op, "rows", rows, " or an MXGradArray")
    check_matrix(op, "rows", rows)
    check_integers(op, "slots", slots)
    check_matrix(op, "slots", slots)
    if probs is not None:
        check_shape(op, "probs", probs, slots.shape, "as slots", "float32")
    check_shape(op, "order", order, rows.shape[:1], "one slot per row", "int")  # only the gradient reads it
    dtype = jnp.dtype(rows.dtype).name
    out_dtype = dtype if out_dtype is None else dtype_name(op, "out_dtype", out_dtype)
    across = peer_memory.check_across(op, across)
    if probs is not None and across is not None:
        fail(ValueError, op, "across", repr(across), "allowed: None with probs; gather the rows, and sum them here")
    options = _Options(dtype, out_dtype, rounding if isinstance(rows, MXGradArray) else None, across)
    rows = rows.once(op) if isinstance(rows, MXGradArray) else rows
    if probs is None:
        return _plain_jitted(*arguments(op, rows, slots, order), options)
    return _weighted(*arguments(op, rows, probs, slots, order), options)
