"""A token goes once to each rank that has one of its experts: the copies of its row, and its replicas there.

    tokens (T, K) --copy per rank--> copies (ep C, K) ==wire==> copies (ep C, K) --replica per expert--> groups (P, K)
    tokens (T, N) <--sum over ranks-- (ep C, N) <==wire== (ep C, N) <--sum of a rank's replicas-- groups (P, N)  summed
    tokens (T, N) <--sum of replicas-- (ep capacity, N) <==wire== <----------- gather ----------- groups (P, N)    once

Both steps to the right are gathers. What travels beside a row is 4 bytes per replica: the slot of the replica in its
copy, `copy * top_k + k`, in the order of the replicas. So the receiver has the replicas of its copies in the form of
`TokenReplicas`, and the padded groups are those that replicas sent one by one would make.

"once": forward and backward return replicas, and every byte is that of replicas sent one by one. "summed": sums are
fp32, of a rank's replicas with k ascending, rounded to the dtype of the rows, sent, and added with ranks ascending.

Sizes are static: a pair of ranks exchanges C = min(T, capacity) copies, not the T top_k rows of a dispatch of replicas.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..core_kernels.formats import Rounding
from . import ops
from ._call import jitted
from ._derivatives import arguments
from .ep import Exchange, TokenReplicas, all_to_all, exchange_rows, send_back, send_rows
from .gathers import gather
from .mx_array import MXArray, MXGradArray, pack
from .ops import RowMap
from .weighted_combine import combine_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """Maps between tokens, copies and padded groups; all int32.

    exchange: of copies. Its sources are tokens, its slots (T * width,) the copies of a token, ranks ascending; width,
    its top_k, is the most ranks of a token. order (ep C,): the slot t * width + w of each copy. replica_order
    (ep capacity,), replica_slots (ep C * top_k,): as `TokenReplicas`, of the replicas of the copies received, in the
    order of arrival. group_order (P,), group_slots (ep C, top_k): the same in the padded groups. -1 is none. summed:
    whether a rank's replicas return as a sum; static.
    """

    exchange: Exchange
    order: jax.Array
    replica_order: jax.Array
    replica_slots: jax.Array
    group_order: jax.Array
    group_slots: jax.Array
    summed: bool = dataclasses.field(metadata={"static": True})


def map_copies(tokens: TokenReplicas, exchange: Exchange, row_map: RowMap, summed: bool) -> Copies:
    """The maps, from the exchange of the tokens' replicas. The ranks exchange the slots of their replicas."""
    t, top_k, ranks, room = tokens.x.shape[0], tokens.top_k, exchange.ep_degree, exchange.capacity
    size, width = min(t, room), min(top_k, ranks)
    rank, sent = jnp.arange(ranks, dtype=jnp.int32)[:, None], exchange.slots >= 0
    # The last place takes the replicas that did not fit.
    place = jnp.where(sent, exchange.slots // max(room, 1) * t + tokens.order // top_k, ranks * t)
    hit = jnp.zeros(ranks * t + 1, bool).at[place].set(True)[:-1].reshape(ranks, t)
    position = jnp.cumsum(hit, axis=1, dtype=jnp.int32) - 1
    token = jnp.arange(t, dtype=jnp.int32)
    copy = jnp.where(hit, rank * size + position, ranks * size)
    slot = token * width + jnp.cumsum(hit, axis=0, dtype=jnp.int32) - 1
    sources = _scatter(ranks * size, copy, jnp.broadcast_to(token, hit.shape))
    slots = _scatter(t * width, jnp.where(hit, slot, t * width), copy)
    order = _scatter(ranks * size, copy, slot)

    replica = jnp.append(position.reshape(-1), 0)[place] * top_k + tokens.order % top_k
    replica = jnp.append(replica, -1)[exchange.sources]
    replica = all_to_all(replica, exchange.axis_name).reshape(ranks, room)
    replica_order = jnp.where(replica < 0, -1, replica + rank * size * top_k).reshape(-1)
    arrival, places = jnp.arange(ranks * room, dtype=jnp.int32), ranks * size * top_k
    replica_slots = _scatter(places, jnp.where(replica_order < 0, places, replica_order), arrival)
    # A padding row, and a slot without a replica, picks the appended -1.
    group_order = jnp.append(replica_order, -1)[row_map.row_map]
    group_slots = jnp.append(row_map.inverse, -1)[replica_slots].reshape(-1, top_k)
    of_copies = dataclasses.replace(exchange, sources=sources, slots=slots, capacity=size, top_k=width)
    return Copies(of_copies, order, replica_order, replica_slots, group_order, group_slots, summed)


def _scatter(size: int, places: jax.Array, values: jax.Array) -> jax.Array:
    """(size,) int32: the value of each place, -1 without one. Values at the place `size` are dropped."""
    return jnp.full(size + 1, -1, jnp.int32).at[places.reshape(-1)].set(values.reshape(-1))[:-1]


def probs_of_copies(probs: jax.Array, exchange: Exchange, copies: Copies) -> jax.Array:
    """probs (M, 1) of this rank's replicas -> (ep C, top_k) of the copies received, zeros for slots without one."""
    received = exchange_rows("combine", probs, exchange)
    of_copies = gather("combine", received, copies.replica_slots, copies.replica_order)
    return of_copies.reshape(copies.group_slots.shape)


# --- once: copies there, replicas back -------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Way:
    """Between tokens and groups. copies, replicas: exchanges whose sources and slots are those of tokens. copy (P,): of
    each row of the groups. inverse (ep capacity,): the row of each replica. recipe's `mx`, rounding: static."""

    copies: Exchange
    replicas: Exchange
    copy: jax.Array
    inverse: jax.Array
    mx: bool = dataclasses.field(metadata={"static": True})
    rounding: Rounding = dataclasses.field(metadata={"static": True})


def _there(x: jax.Array, way: Way) -> Any:
    """Groups (P, K): an array, or its bytes (q, sf)."""
    if not way.mx:
        return ops.permute_rows(send_rows(x, way.copies), way.copy)
    return ops.permute_mx(send_rows(ops.quantize_row_packed(x, rounding=way.rounding), way.copies), way.copy)


@jax.custom_vjp
def _send_once(x: jax.Array, way: Way) -> jax.Array | MXArray:
    groups = _there(x, way)
    if not way.mx:
        return groups
    q, sf = groups
    return MXArray.from_bytes(q, sf, x.dtype)


def _send_once_bwd(way, grad):
    rows = ops.permute_rows(grad.carrier if way.mx else grad, way.inverse)
    return send_back(rows, way.replicas), None


_send_once.defvjp(lambda x, way: (_send_once(x, way), way), _send_once_bwd)


def send_once(x: jax.Array, way: Way) -> Any:
    """Tokens (T, K) to groups (P, K)."""
    return _send_once(*arguments("dispatch", x, way))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _return_each(groups: Any, way: Way, out_dtype: str) -> jax.Array:
    rows = ops.permute_rows(groups.value if way.mx else groups, way.inverse)
    return _sum(all_to_all(rows, way.replicas.axis_name), way.replicas, out_dtype)


def _return_each_fwd(groups, way, out_dtype):
    return _return_each(groups, way, out_dtype), (way, jnp.zeros(0, groups.dtype))


def _return_each_bwd(out_dtype, residuals, dy):
    way, like = residuals
    drows = _there(dy.astype(like.dtype), way)
    return MXGradArray.cotangent(None, drows) if way.mx else drows, None


_return_each.defvjp(_return_each_fwd, _return_each_bwd)
_return_each_jitted = jitted(_return_each, 2)


def return_each(groups: Any, way: Way, out_dtype: str) -> jax.Array:
    """Groups (P, N) to the unweighted sums of tokens (T, N)."""
    groups = groups.once("combine") if way.mx else groups
    return _return_each_jitted(*arguments("combine", groups, way), out_dtype)


def _sum(rows: jax.Array, exchange: Exchange, out_dtype: str) -> jax.Array:
    """The sums (T, N) of what an all-to-all has brought back."""
    unweighted = jnp.zeros(0, jnp.float32)
    return ops.combine(rows, exchange.slots.reshape(-1, exchange.top_k), unweighted, out_dtype=out_dtype)


# --- summed: copies there, sums back ---------------------------------------------------------------


def exchange_copies(x: jax.Array, copies: Copies, rounding: Rounding | None) -> Any:
    """Tokens (T, K) to the copies received (ep C, K), quantized if there is a rounding; the gradients of a token's
    copies are summed."""
    return exchange_rows("dispatch", x, copies.exchange, fwd=rounding)


@jax.custom_vjp
def _sum_mx(groups: MXGradArray, slots: jax.Array, copy: jax.Array) -> MXGradArray:
    return MXGradArray.of(ops.combine(groups.value, slots, jnp.zeros(0, jnp.float32), out_dtype=groups.dtype))


def _sum_mx_fwd(groups, slots, copy):
    # With symbolic_zeros every leaf is (value, perturbed).
    return _sum_mx(MXGradArray.of(groups.value.value), slots.value, copy.value), copy.value


def _sum_mx_bwd(copy, grad: MXGradArray):
    value, mx = grad.parts()
    value = None if value is None else ops.permute_rows(value, copy)
    mx = None if mx is None else ops.permute_mx(pack(*mx), copy)
    return MXGradArray.cotangent(value, mx, grad.uses), None, None


_sum_mx.defvjp(_sum_mx_fwd, _sum_mx_bwd, symbolic_zeros=True)
_sum_mx_jitted = jitted(_sum_mx)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _return_sums(sums: Any, exchange: Exchange, out_dtype: str, rounding: Rounding | None) -> jax.Array:
    return _sum(all_to_all(sums if rounding is None else sums.value, exchange.axis_name), exchange, out_dtype)


def _return_sums_fwd(sums, exchange, out_dtype, rounding):
    return _return_sums(sums, exchange, out_dtype, rounding), (exchange, jnp.zeros(0, sums.dtype))


def _return_sums_bwd(out_dtype, rounding, residuals, dy):
    exchange, like = residuals
    dy = dy.astype(like.dtype)
    if rounding is None:
        return send_rows(dy, exchange), None
    rows = MXArray.from_packed(send_rows(ops.quantize_row_packed(dy, rounding=rounding), exchange))
    return MXGradArray.cotangent(None, (rows.q, rows.sf)), None


_return_sums.defvjp(_return_sums_fwd, _return_sums_bwd)
_return_sums_jitted = jitted(_return_sums, 2, 3)


def exchange_sums(
    groups: Any, probs: jax.Array | None, copies: Copies, out_dtype: str, rounding: Rounding | None
) -> jax.Array:
    """(T, N): the sums over a rank's replicas, weighted by probs (ep C, top_k), sent back and added. groups: an
    MXGradArray if there is a rounding, that of its gradient."""
    op, (slots, order) = "combine", (copies.group_slots, copies.group_order)
    sums: Any
    if probs is None and rounding is not None:
        sums = _sum_mx_jitted(*arguments(op, groups.once(op), slots, order // slots.shape[1]))
    else:
        dtype = jnp.dtype(groups.dtype).name
        sums = combine_slots(op, groups, probs, slots, order, out_dtype=dtype, rounding=rounding or Rounding.RCEIL)
        sums = sums if rounding is None else MXGradArray.wrap(sums)
    return _return_sums_jitted(*arguments(op, sums, copies.exchange), out_dtype, rounding)
