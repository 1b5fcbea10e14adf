"""The public functions of rows: gathers and sums by maps, and the exchange of rows that an `Exchange` lays out.

    spread_rows         x (T, D) --order // top_k--> rows (P, D)
    gather_rows         x (M, K) --row_map--> rows (P, K)
    weighted_combine    rows (R, D), probs (T, K) --slots--> y (T, D)
    a2a_dispatch        x (M, D) --all-to-all--> rows (ep * capacity, D) --permute--> groups (P, D)

With `across` a map leads to rows of other ranks. This file checks the arguments; gathers.py, permute.py,
weighted_combine.py and all_to_all.py compute.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail
from ..ops import RowMap
from ..ops.checks import (
    check_counts,
    check_floats,
    check_integers,
    check_matrix,
    check_shape,
    check_size,
    check_type,
    check_vector,
    dtype_name,
    rounding_of,
)
from ..ops.mx_array import MXArray, MXGradArray
from ..ops.shapes import Float, Float32, Int
from ..products.gathers import HERE, Rows, gather
from ..products.groups import laid_out, map_groups
from ..routing.permute import spread
from ..routing.weighted_combine import combine_slots
from .all_to_all import Exchange, TokenReplicas, check_replicas, exchange_rows
from .peer_rows import Across, reader_of


def spread_rows(
    x: Rows, order: Int[jax.Array, " P"], inverse: Int[jax.Array, " T*top_k"], top_k: int, *, across: Across = None
) -> Rows:
    """Replicate each token for its top_k experts: out[i] = x[order[i] // top_k], zeros where order is -1.

    Args:
        x: (T, D) bf16, fp32 or MXArray.
        order: (P,) int32, the slot t * top_k + k of each row of the result, -1 for a row of zeros.
        inverse: (T * top_k,) int32, the row of each slot. `sort_by_expert` makes them with P = T * top_k.
        top_k: experts per token.
        across: a PeerMemory, inside of a shard_map over its axes: slot s of rank q has the number q T top_k + s in
            order, row i of rank q the number q P + i in inverse.

    Returns:
        (P, D) of x's kind. The gradient of a token is the fp32 sum over its replicas, rounded once.

    Raises:
        ValueError: shapes.
        TypeError: dtypes.

    Example:
        >>> spread_rows(jnp.array([[1.0], [2.0]]), jnp.array([2, 0, 1, 3]), jnp.array([1, 2, 0, 3]), 2).tolist()
        [[2.0], [1.0], [1.0], [2.0]]
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

    Args:
        x: (M, K) bf16, fp32 or MXArray.
        row_map: (P,) int32, the row of x for each row of the result, -1 for a row of zeros.
        inverse: (M,) int32, the map back: the row of the result for each row of x, -1 for none.
        across: a PeerMemory, inside of a shard_map over its axes: row r of rank q has the number q M + r in
            row_map, row i the number q P + i in inverse.

    Returns:
        (P, K) of x's kind.

    Raises:
        ValueError: shapes.
        TypeError: dtypes.

    Example:
        >>> gather_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, -1, 0]), jnp.array([2, 0])).tolist()
        [[2.0], [0.0], [1.0]]
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

    Args:
        rows: (R, D) bf16 or fp32, or an MXGradArray, whose gradient is quantized with `rounding`.
        probs: (T, K) float32, or None for an unweighted sum, which saves no rows for its gradient.
        slots: (T, K) int32, the row of each slot, -1 for none.
        order: (R,) int32, the map back: the slot t * K + k of each row, -1 for padding, whose gradient is zeros.
        out_dtype: bf16 or fp32; None is the dtype of rows.
        rounding: a `Rounding` or its name, for the gradient of an MXGradArray.
        across: a PeerMemory, inside of a shard_map over its axes, without probs: row r of rank q has the number
            q R + r in slots, and slot s of rank q the number q T K + s in order.

    Returns:
        (T, D). A gradient has its argument's dtype; the gradient of an MXGradArray is MXFP8.

    Raises:
        ValueError: shapes.
        TypeError: dtypes.

    Example:
        >>> slots, order = jnp.array([[1, 0]]), jnp.array([1, 0])
        >>> weighted_combine(jnp.array([[1.0], [2.0]]), jnp.array([[0.5, 0.25]]), slots, order).tolist()
        [[1.25]]
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


def replicas_to_send(op: str, input: Any, plan: Exchange) -> tuple[jax.Array, Exchange]:
    """The array to send and its exchange, of rows or TokenReplicas; TypeError and ValueError unless they fit it."""
    if not isinstance(input, TokenReplicas):
        check_rows(op, input, plan.num_rows, "the exchange's local rows", " or TokenReplicas")
        return input, plan
    x, top_k = input.x, input.top_k
    check_floats(op, "input", x)
    check_replicas(op, input)
    if x.ndim != 2 or x.shape[0] * top_k != plan.num_rows:
        allowed = f"allowed: (T, D) with T * top_k = {plan.num_rows}, the exchange's local rows"
        fail(ValueError, op, "input", f"shape {x.shape} with top_k {top_k}", allowed)
    return x, plan.of_replicas(input)


def check_rows(op: str, x: Any, rows: int, what: str, other: str = "") -> None:
    """TypeError unless x is an array of floats, ValueError unless it has this number of rows."""
    check_floats(op, "input", x, other)
    if len(x.shape) != 2 or x.shape[0] != rows:
        fail(ValueError, op, "input", f"shape {x.shape}", f"allowed: ({rows}, D), {what}")


def a2a_dispatch(input: Float[jax.Array, "M D"] | TokenReplicas, exchange: Exchange) -> Float[jax.Array, "P D"]:
    """Send rows to the ranks of their experts as they are, forward and backward.

    Args:
        input: (M, D) bf16 or fp32, sorted by expert; or TokenReplicas, with M = T * top_k, which go from the tokens
            directly into the send buffer, and whose gradient is summed over a token's replicas in fp32 and rounded
            once.
        exchange: of `plan_exchange` for these M rows.

    Returns:
        (P, D) of input's dtype, P = ep_degree * capacity, for `permute`: the rows of source rank s start at s *
        capacity, and `exchange.recv_counts` has their numbers.

    Raises:
        ValueError: shapes.
        TypeError: dtypes.

    Example:
        >>> from mxep.jax_frontend.exchange.all_to_all import plan_exchange
        >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
        >>> a2a_dispatch(jnp.ones((3, 32)), exchange).shape
        (3, 32)
    """
    op = "a2a_dispatch"
    check_type(op, "exchange", exchange, Exchange)
    rows, plan = replicas_to_send(op, input, exchange)
    return exchange_rows(op, rows, plan)


def permute(
    x: Rows, num_tokens_per_expert: Int[jax.Array, " G"] | Exchange, group_size_multiple_of: int = BLOCK
) -> tuple[Rows, RowMap]:
    """Gather rows into one padded group per local expert.

    Args:
        x: (R, K) bf16, fp32 or MXArray.
        num_tokens_per_expert: the Exchange that sent the rows, which says how they came from several ranks; or (G,) of
            an integer dtype, the sizes of groups that follow each other. For rows of several ranks that no Exchange
            sent, `ops.row_map` makes the maps and `gather_rows` takes them.
        group_size_multiple_of: a positive multiple of 32; an empty expert has one aligned group.

    Returns:
        (rows (P, K) of x's kind, RowMap). P holds any split of R rows; padding rows are zeros. The gradient of an
        MXArray is a float array.

    Raises:
        ValueError: shapes, counts that do not fit.
        TypeError: dtypes.

    Example:
        >>> rows, row_map = permute(jnp.ones((3, 32)), jnp.array([2, 1]))
        >>> rows.shape, row_map.padded_counts.tolist()
        ((96, 32), [32, 32])
    """
    op = "permute"
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    return gather_groups(op, "x", x, num_tokens_per_expert, group_size_multiple_of)


def gather_groups(op: str, name: str, x: Rows, counts: Any, alignment: int) -> tuple[Rows, RowMap]:
    """`permute` of the argument `name`, whose type the caller has checked."""
    check_matrix(op, name, x)
    check_size(op, "group_size_multiple_of", alignment, BLOCK)
    if isinstance(counts, Exchange):
        rows = counts.ep_degree * counts.capacity
        if x.shape[0] != rows:
            fail(ValueError, op, name, f"shape {x.shape}", f"allowed: {rows} rows, what the exchange dispatched")
        maps = counts.map_rows(alignment)
    else:
        check_integers(op, "num_tokens_per_expert", counts, " or an Exchange")
        if counts.ndim != 1 or not counts.size:
            fail(ValueError, op, "num_tokens_per_expert", f"shape {counts.shape}", "allowed: (G,), or an Exchange")
        check_counts(op, counts, 1, x.shape[0])
        maps = map_groups(counts, x.shape[0], alignment)
    return laid_out(gather(op, x, maps.row_map, maps.inverse), maps), maps
