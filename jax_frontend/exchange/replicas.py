"""A token is sent once to each rank that has one of its experts: the copies of its row, and its replicas there.

    tokens (T, K) --copy per rank--> copies (ep C, K) ==wire==> copies (ep C, K) --replica per expert--> groups (P, K)
    tokens (T, N) <--sum over ranks-- (ep C, N) <==wire== (ep C, N) <--sum of a rank's replicas-- groups (P, N)  summed
    tokens (T, N) <--sum of replicas-- (ep capacity, N) <==wire== <----------- gather ----------- groups (P, N)    once

Both steps to the right are gathers. In addition to rows the ranks send 4 bytes per replica, in the order of the
replicas. They are the slot of the replica in its copy, `copy * top_k + k`. So the receiver has the replicas of its
copies in the form of `TokenReplicas`. The padded groups equal the groups of replicas that are sent one by one.

"dispatch": forward and backward return replicas, and all bytes equal the bytes with None. "both": a rank sums its
replicas of a token in fp32, k ascending, rounds each sum to the dtype of the rows and sends it. The sums of the ranks
are added with ranks ascending.

Sizes are static: a pair of ranks exchanges C = min(T, capacity) copies, not the T top_k rows of a dispatch of replicas.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...core_kernels.formats import Rounding
from ...core_kernels.policy.recipe import Recipe
from .. import ops
from ..ops import RowMap
from ..ops.call import jitted
from ..ops.derivatives import arguments
from ..ops.mx_array import MXArray, MXGradArray, pack
from ..products.gathers import gather
from ..routing.permute import spread
from ..routing.weighted_combine import combine_slots
from .all_to_all import AllToAll, Exchange, TokenReplicas, all_to_all, exchange_rows, send_back, send_rows, sorted_probs
from .route import Route


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """Maps between tokens, copies and padded groups; all int32.

    exchange: of copies. Its sources are tokens, its slots (T * width,) the copies of a token, ranks ascending; width,
    its top_k, is the most ranks of a token. replica_order (ep capacity,), replica_slots (ep C * top_k,): as
    `TokenReplicas`, of the replicas of the received copies, in the order received. group_order (P,), group_slots
    (ep C, top_k): the same in the padded groups. -1 is none.
    """

    exchange: Exchange
    replica_order: jax.Array
    replica_slots: jax.Array
    group_order: jax.Array
    group_slots: jax.Array


def map_copies(tokens: TokenReplicas, exchange: Exchange, row_map: RowMap) -> Copies:
    """The maps, from the exchange of the tokens' replicas. The ranks exchange the slots of their replicas."""
    t, top_k, ranks, capacity = tokens.x.shape[0], tokens.top_k, exchange.ep_degree, exchange.capacity
    size, width = min(t, capacity), min(top_k, ranks)
    rank, sent = jnp.arange(ranks, dtype=jnp.int32)[:, None], exchange.slots >= 0
    # The last element is for the replicas that did not fit.
    index = jnp.where(sent, exchange.slots // max(capacity, 1) * t + tokens.order // top_k, ranks * t)
    hit = jnp.zeros(ranks * t + 1, bool).at[index].set(True)[:-1].reshape(ranks, t)
    position = jnp.cumsum(hit, axis=1, dtype=jnp.int32) - 1
    token = jnp.arange(t, dtype=jnp.int32)[None]
    copy = jnp.where(hit, rank * size + position, ranks * size)
    slot = token * width + jnp.cumsum(hit, axis=0, dtype=jnp.int32) - 1
    sources = _scatter(ranks * size, copy, jnp.broadcast_to(token, hit.shape))
    slots = _scatter(t * width, jnp.where(hit, slot, t * width), copy)

    replica = jnp.append(position.reshape(-1), 0)[index] * top_k + tokens.order % top_k
    replica = jnp.append(replica, -1)[exchange.sources]
    replica = all_to_all(replica, exchange.axis_name).reshape(ranks, capacity)
    replica_order = jnp.where(replica < 0, -1, replica + rank * size * top_k).reshape(-1)
    arrival, num_slots = jnp.arange(ranks * capacity, dtype=jnp.int32), ranks * size * top_k
    replica_slots = _scatter(num_slots, jnp.where(replica_order < 0, num_slots, replica_order), arrival)
    # A padding row, and a slot without a replica, picks the appended -1.
    group_order = jnp.append(replica_order, -1)[row_map.row_map]
    group_slots = jnp.append(row_map.inverse, -1)[replica_slots].reshape(-1, top_k)
    of_copies = dataclasses.replace(exchange, sources=sources, slots=slots, capacity=size, top_k=width)
    return Copies(of_copies, replica_order, replica_slots, group_order, group_slots)


def _scatter(size: int, indices: jax.Array, values: jax.Array) -> jax.Array:
    """(size,) int32: the value at each index, -1 without one. Values at the index `size` are dropped."""
    return jnp.full(size + 1, -1, jnp.int32).at[indices.reshape(-1)].set(values.reshape(-1))[:-1]


# --- once: copies there, replicas back -------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DedupPlan:
    """Between tokens and groups. copies, replicas: exchanges with sources and slots of tokens. copy (P,): the copy for
    each row of the groups. inverse (ep capacity,): the row of each replica. recipe's `mx`, rounding: static."""

    copies: Exchange
    replicas: Exchange
    copy: jax.Array
    inverse: jax.Array
    mx: bool = dataclasses.field(metadata={"static": True})
    rounding: Rounding = dataclasses.field(metadata={"static": True})


def _dispatch(x: jax.Array, dedup: DedupPlan) -> Any:
    """Groups (P, K): an array, or its bytes (q, sf)."""
    if not dedup.mx:
        return ops.permute_rows(send_rows(x, dedup.copies), dedup.copy)
    return ops.permute_mx(send_rows(ops.quantize_row_packed(x, rounding=dedup.rounding), dedup.copies), dedup.copy)


@jax.custom_vjp
def _send_once(x: jax.Array, dedup: DedupPlan) -> jax.Array | MXArray:
    groups = _dispatch(x, dedup)
    if not dedup.mx:
        return groups
    q, sf = groups
    return MXArray.from_bytes(q, sf, x.dtype)


def _send_once_bwd(dedup, grad):
    rows = ops.permute_rows(grad.carrier if dedup.mx else grad, dedup.inverse)
    return send_back(rows, dedup.replicas), None


_send_once.defvjp(lambda x, dedup: (_send_once(x, dedup), dedup), _send_once_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _return_each(groups: Any, dedup: DedupPlan, out_dtype: str) -> jax.Array:
    rows = ops.permute_rows(groups.value if dedup.mx else groups, dedup.inverse)
    return _sum(all_to_all(rows, dedup.replicas.axis_name), dedup.replicas, out_dtype)


def _return_each_fwd(groups, dedup, out_dtype):
    return _return_each(groups, dedup, out_dtype), (dedup, jnp.zeros(0, groups.dtype))


def _return_each_bwd(out_dtype, residuals, dy):
    dedup, like = residuals
    drows = _dispatch(dy.astype(like.dtype), dedup)
    return MXGradArray.cotangent(None, drows) if dedup.mx else drows, None


_return_each.defvjp(_return_each_fwd, _return_each_bwd)
_return_each_jitted = jitted(_return_each, 2)


def _sum(rows: jax.Array, exchange: Exchange, out_dtype: str) -> jax.Array:
    """The sums (T, N) of the rows that an all-to-all has sent back."""
    unweighted = jnp.zeros(0, jnp.float32)
    return ops.combine(rows, exchange.slots.reshape(-1, exchange.top_k), unweighted, out_dtype=out_dtype)


def _make_dedup_plan(
    slots: jax.Array, top_k: int, plan: Exchange, row_map: RowMap, copies: Copies, recipe: Recipe
) -> DedupPlan:
    each = dataclasses.replace(plan, slots=plan.slots[slots], top_k=top_k)
    return DedupPlan(copies.exchange, each, copies.group_order // top_k, row_map.inverse, recipe.mx, recipe.rounding)


@dataclasses.dataclass(frozen=True)
class Once(AllToAll):
    """A row per token and rank in the dispatch, a row per replica in the combine."""

    def send(self, x: jax.Array, rows: TokenReplicas, plan: Exchange, recipe: Recipe) -> tuple[Any, RowMap, Copies]:
        row_map = plan.map_rows(recipe.alignment)
        copies = map_copies(rows, plan, row_map)
        dedup = _make_dedup_plan(rows.inverse, rows.top_k, plan, row_map, copies, recipe)
        return _send_once(*arguments("dispatch", x, dedup)), row_map, copies

    def combine(self, groups: Any, route: Route, probs: jax.Array | None, out_dtype: str) -> jax.Array:
        if probs is not None:  # the gradient of a weighted sum reads the replicas again, at their tokens
            return super().combine(groups, route, probs, out_dtype)
        (_, slots), sent = route.maps.tokens, route.maps
        dedup = _make_dedup_plan(slots, route.top_k, sent.plan, route.row_map, sent.copies, route.recipe)
        groups = groups.once("combine") if dedup.mx else groups
        return _return_each_jitted(*arguments("combine", groups, dedup), out_dtype)


# --- summed: copies there, sums back ---------------------------------------------------------------


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


@dataclasses.dataclass(frozen=True)
class Summed(AllToAll):
    """A row per token and rank, both ways: a rank sums its replicas of a token."""

    def send(self, x: jax.Array, rows: TokenReplicas, plan: Exchange, recipe: Recipe) -> tuple[Any, RowMap, Copies]:
        row_map = plan.map_rows(recipe.alignment)
        copies = map_copies(rows, plan, row_map)
        received = exchange_rows("dispatch", x, copies.exchange, fwd=recipe.rounding if recipe.mx else None)
        slots = copies.group_slots.reshape(-1)
        return spread("dispatch", received, copies.group_order, slots, rows.top_k), row_map, copies

    def combine(self, groups: Any, route: Route, probs: jax.Array | None, out_dtype: str) -> jax.Array:
        op, recipe, copies = "combine", route.recipe, route.maps.copies
        rounding = recipe.rounding if recipe.mx else None
        slots, order, sums = copies.group_slots, copies.group_order, groups
        if probs is not None:  # zeros for slots without a replica
            received = exchange_rows(op, sorted_probs(op, probs.reshape(-1, 1), route), route.maps.plan)
            probs = gather(op, received, copies.replica_slots, copies.replica_order).reshape(slots.shape)
        if probs is None and rounding is not None:
            sums = _sum_mx_jitted(*arguments(op, groups.once(op), slots, order // slots.shape[1]))
        else:
            dtype = jnp.dtype(groups.dtype).name
            sums = combine_slots(op, groups, probs, slots, order, out_dtype=dtype, rounding=recipe.rounding)
            sums = sums if rounding is None else MXGradArray.wrap(sums)
        return _return_sums_jitted(*arguments(op, sums, copies.exchange), out_dtype, rounding)
