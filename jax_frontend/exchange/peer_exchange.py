"""Dispatch and combine through memory of peers: the position of each row of each rank, in numbers across ranks.

    tokens (T, K) of all ranks --one gather, by `order`--> padded groups (P, K) of this rank's experts
    tokens (T, N) <--one sum, by `slots`-- padded groups (P, N) of all ranks

The ranks exchange their counts and, of tokens, the orders of their replicas: 4 bytes a row. Every rank then knows the
rows of its groups, and the positions of its own rows in the groups of all ranks. The groups have the rows of rank 0,
1, ..., in this order, as the groups of the all-to-all. peer_memory.py reads the rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core_kernels.launch import fail
from ...core_kernels.policy.overflow import OnOverflow
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.routing.plan import padded_rows
from ..ops import RowMap
from ..ops.mesh import Axes, axis_size
from ..products.gathers import HERE, gather, ungather
from ..routing.overflow import capacity_of, nan_gradients
from .all_to_all import TokenReplicas, lost_of, most_rows, parts_of
from .local import SlotMaps, read_groups, sum_groups
from .peer_memory import Peers, all_ranks
from .route import Route


@dataclasses.dataclass(frozen=True)
class PeerMemory:
    """Kernels read rows in the memory of the other GPUs of this process. All ranks share the buffer of a rank, of
    `capacity_factor` times its mean rows. The maps are `SlotMaps` with numbers across ranks. `Route.row_map` has such
    numbers too, between the sorted rows of the ranks and their padded groups."""

    axis_name: Axes
    capacity_factor: float | None
    on_overflow: OnOverflow

    def dispatch(self, rows: Any, counts: jax.Array, recipe: Recipe) -> tuple[Any, Route]:
        x, top_k, num_rows = parts_of(rows)
        capacity, whole = share_capacity(self.axis_name, rows, counts.shape[0], self.capacity_factor)
        row_map, maps = map_peers(rows, counts, self.axis_name, num_rows, capacity, recipe.alignment)
        lost = lost_of(rows, counts, row_map.inverse, whole, self.on_overflow)
        route = Route(row_map, maps, self, recipe, top_k, lost)
        return read_groups(nan_gradients("dispatch", x, lost), route, Peers(self.axis_name)), route

    def dispatch_probs(self, op: str, probs: jax.Array, route: Route) -> jax.Array:
        return gather(op, probs, route.maps.order, route.maps.slots, Peers(self.axis_name))

    def combine(self, groups: Any, route: Route, probs: jax.Array | None, out_dtype: str) -> jax.Array:
        maps, reader = route.maps, Peers(self.axis_name)
        if probs is None:
            return sum_groups(groups, route, maps.slots, maps.order, None, out_dtype, reader)
        # The gradient of a weighted sum reads the rows again, so they are read into this rank's memory first.
        rows = ungather("combine", groups, maps.order, maps.slots, reader)
        here = jnp.arange(maps.num_rows, dtype=jnp.int32)
        return sum_groups(rows, route, here, here, probs, out_dtype, HERE)


def share_capacity(axis_name: Axes, rows: Any, experts: int, capacity_factor: float | None) -> tuple[int, bool]:
    """The rows of a rank, and whether all rows of all ranks fit."""
    ranks, (_, _, num_rows) = axis_size("dispatch", axis_name), parts_of(rows)
    most = ranks * most_rows(rows, experts // ranks)
    capacity = capacity_of("dispatch", capacity_factor, num_rows, 1, most)
    return capacity, capacity == ranks * num_rows


def map_peers(
    rows: Any, counts: jax.Array, axis_name: Axes, num_rows: int, capacity: int, alignment: int
) -> tuple[RowMap, SlotMaps]:
    """The maps of one dispatch, in numbers across ranks: row_map (P,) of sorted rows, inverse (M,) of padded rows.
    capacity: rows of a rank.

    Raises ValueError if all ranks together have 2^31 padded rows."""
    op = "dispatch"
    ranks, rank, experts = axis_size(op, axis_name), lax.axis_index(axis_name), counts.shape[0]
    local = experts // ranks
    padded = padded_rows(capacity, local, alignment)
    if ranks * max(padded, num_rows) >= 2**31:
        got = f"{ranks} ranks with {padded} padded rows"
        fail(ValueError, op, "capacity_factor", got, "allowed: fewer than 2^31 padded rows on all ranks")
    # Wrong counts are clipped: inside jit nothing checks them, and a row must be in its rank's memory.
    ends = jnp.minimum(jnp.cumsum(jnp.clip(counts.astype(jnp.int32), 0, num_rows)), num_rows)
    counts = jnp.diff(ends, prepend=0)
    table = all_ranks(counts[None], axis_name)

    # Of rank `owner` and its expert `local`: the rows that each source has for it, and those that fit.
    sent = table.T.reshape(ranks, local * ranks)
    fitting = jnp.diff(jnp.minimum(jnp.cumsum(sent, 1), capacity), axis=1, prepend=0).reshape(ranks, local, ranks)
    sizes = jnp.maximum(-(-fitting.sum(2) // alignment), 1) * alignment
    group_ends = jnp.cumsum(sizes, 1)
    first = (group_ends - sizes)[..., None] + jnp.cumsum(fitting, 2) - fitting

    # The positions of this rank's rows. Comparisons and sums as in `plan_exchange`.
    row = jnp.arange(num_rows, dtype=jnp.int32)
    expert = jnp.minimum((row[:, None] >= ends).sum(1, dtype=jnp.int32), experts - 1)
    position = row - (ends - counts)[expert]
    own_first, own_fitting = (jnp.take(x, rank, axis=2).reshape(-1) for x in (first, fitting))
    inverse = expert // local * padded + own_first[expert] + position
    inverse = jnp.where(position < own_fitting[expert], inverse, -1)

    # The sources of this rank's padded rows: the last part that starts at or before a row has it, or nobody.
    position, starts = jnp.arange(padded, dtype=jnp.int32), jnp.take(first, rank, axis=0).reshape(-1)
    part = (position[:, None] >= starts).sum(1, dtype=jnp.int32) - 1
    position -= starts[part]
    source = part % ranks
    before = (jnp.cumsum(table, 1) - table)[source, rank * local + part // ranks]
    found = position < jnp.take(fitting, rank, axis=0).reshape(-1)[part]
    row_map = jnp.where(found, source * num_rows + before + position, -1)

    order, slots = row_map, inverse
    if isinstance(rows, TokenReplicas):
        # A slot beyond the rows of its rank is the row of another; row -1 is the appended -1.
        own = jnp.where((rows.order >= 0) & (rows.order < num_rows), rows.order + rank * num_rows, -1)
        order, slots = jnp.append(all_ranks(own, axis_name), -1)[row_map], inverse[rows.inverse]
    own_sizes, own_ends = (jnp.take(x, rank, axis=0) for x in (sizes, group_ends))
    maps = RowMap(*(x.astype(jnp.int32) for x in (row_map, inverse, own_sizes, own_ends)))
    overflow = (counts - own_fitting).sum().astype(jnp.int32)
    return maps, SlotMaps(order.astype(jnp.int32), slots.astype(jnp.int32), overflow)
