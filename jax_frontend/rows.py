"""The public gathers and sums of rows: by maps of this rank, or with `across` by maps that lead to rows of other ranks.

    spread_rows         x (T, D) --order // top_k--> rows (P, D)
    gather_rows         x (M, K) --row_map--> rows (P, K)
    weighted_combine    rows (R, D), probs (T, K) --slots--> y (T, D)

This file checks the arguments; gathers.py, permute.py and weighted_combine.py compute.
"""

import jax
import jax.numpy as jnp

from ..core_kernels.formats import Rounding
from ..core_kernels.launch import fail
from ._checks import (
    check_floats,
    check_integers,
    check_matrix,
    check_shape,
    check_size,
    check_vector,
    dtype_name,
    rounding_of,
)
from ._shapes import Float, Float32, Int
from .gathers import HERE, Rows, gather
from .mx_array import MXArray, MXGradArray
from .peer_memory import Across, reader_of
from .permute import spread
from .weighted_combine import combine_slots


def spread_rows(
    x: Rows, order: Int[jax.Array, " P"], inverse: Int[jax.Array, " T*top_k"], top_k: int, *, across: Across = None
) -> Rows:
    """Replicate each token for its top_k experts: out[i] = x[order[i] // top_k], zeros where order is -1.

    x: (T, D) bf16, fp32 or MXArray. order: (P,), the slot t * top_k + k of each row of the result. inverse:
    (T * top_k,), the row of each slot; both int32, P = T * top_k for those of `sort_by_expert`.
    across: mesh axes of the enclosing shard_map: slot s of rank q has the number q T top_k + s in order, row i of rank
    q the number q P + i in inverse.
    Returns (P, D) of x's kind. The gradient of a token is the fp32 sum over its replicas, rounded once.

    >>> spread_rows(jnp.array([[1.0], [2.0]]), jnp.array([2, 0, 1, 3]), jnp.array([1, 2, 0, 3]), 2).tolist()
    [[2.0], [1.0], [1.0], [2.0]]

    Raises ValueError (shapes) and TypeError (dtypes).
    """
    op = "spread_rows"
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    check_size(op, "top_k", top_k, 1)
    check_matrix(op, "x", x)
    check_vector(op, "order", order)
    check_shape(op, "inverse", inverse, (x.shape[0] * top_k,), "x's rows, `top_k` times", "int")
    return spread(op, x, order, inverse, top_k, reader_of(op, across))


def gather_rows(
    x: Rows, row_map: Int[jax.Array, " P"], inverse: Int[jax.Array, " M"], *, across: Across = None
) -> Rows:
    """Return x[row_map], zeros where the map is -1; the gradient goes through `inverse`.

    x: (M, K) bf16, fp32 or MXArray. row_map: (P,), inverse: (M,), the map back; both int32. across: mesh axes of the
    enclosing shard_map: row r of rank q has the number q M + r in row_map, row i the number q P + i in inverse. Returns
    (P, K) of x's kind.

    >>> gather_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, -1, 0]), jnp.array([2, 0])).tolist()
    [[2.0], [0.0], [1.0]]

    Raises ValueError (shapes) and TypeError (dtypes).
    """
    op = "gather_rows"
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    check_matrix(op, "x", x)
    check_vector(op, "row_map", row_map)
    check_shape(op, "inverse", inverse, x.shape[:1], "the rows of x", "int")
    return gather(op, x, row_map, inverse, reader_of(op, across))


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
    Returns (T, D). A gradient has its argument's dtype; the gradient of an MXGradArray is MXFP8.

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
    reader = reader_of(op, across)
    if probs is not None and reader is not HERE:
        fail(ValueError, op, "across", repr(across), "allowed: None with probs; gather the rows, and sum them here")
    return combine_slots(op, rows, probs, slots, order, out_dtype=out_dtype, rounding=rounding, reader=reader)
