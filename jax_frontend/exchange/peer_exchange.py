"""Dispatch and combine through memory of peers: the position of each row of each rank, in numbers across ranks.

    tokens (T, K) of all ranks --one gather, by `order`--> padded groups (P, K) of this rank's experts
    tokens (T, N) <--one sum, by `slots`-- padded groups (P, N) of all ranks

The ranks exchange their counts and, of tokens, the orders of their replicas: 4 bytes a row. Every rank then knows the
rows of its groups, and the positions of its own rows in the groups of all ranks. The groups have the rows of rank 0,
1, ..., in this order, as the groups of the all-to-all. peer_rows.py reads the rows. rounds.py has maps of several
exchanges of a call, each of the rows that it takes.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...core_kernels.launch import fail
from ...core_kernels.policy.overflow import OnOverflow
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.routing.plan import padded_rows
from ..ops import RowMap
from ..ops.checks import clip_counts
from ..ops.mesh import Axes, axis_size
from ..products.gathers import HERE, gather, ungather
from ..routing.overflow import capacity_of, nan_gradients
from .all_to_all import TokenReplicas, lost_of, most_rows, parts_of
from .local import SlotMaps, read_groups, sum_groups
from .peer_memory import PeerMemory
from .peer_rows import Peers, all_ranks
from .route import Route


@dataclasses.dataclass(frozen=True)
class PeerExchange:
    """Kernels read rows in the memory of the other GPUs. All ranks share the buffer of a rank, of
    `capacity_factor` times its mean rows. The maps are `SlotMaps` with numbers across ranks. `Route.row_map` has such
    numbers too, between the sorted rows of the ranks and their padded groups."""

    memory: PeerMemory
    capacity_factor: float | None
    on_overflow: OnOverflow

    def dispatch(self, rows: Any, counts: jax.Array, recipe: Recipe) -> tuple[Any, Route]:
        x, top_k, _ = parts_of(rows)
        sizes = PeerSizes.of(self.memory.axis_name, rows, counts.shape[0], self.capacity_factor, recipe.alignment)
        shared = share(rows, counts, sizes)
        row_map, maps = map_peers(shared, Taken(jnp.zeros_like(shared.counts), fitting_rows(shared, sizes)), sizes)
        lost = lost_of(rows, counts, row_map.inverse, sizes.holds_all, self.on_overflow)
        route = Route(row_map, maps, self, recipe, top_k, lost)
        return read_groups(nan_gradients("dispatch", x, lost), route, Peers(self.memory)), route

    def dispatch_probs(self, op: str, probs: jax.Array, route: Route) -> jax.Array:
        return gather(op, probs, route.maps.order, route.maps.slots, Peers(self.memory))

    def combine(self, groups: Any, route: Route, probs: jax.Array | None, out_dtype: str) -> jax.Array:
        maps, reader = route.maps, Peers(self.memory)
        if probs is None:
            return sum_groups(groups, route, maps.slots, maps.order, None, out_dtype, reader)
        # The gradient of a weighted sum reads the rows again, so they are read into this rank's memory first.
        rows = ungather("combine", groups, maps.order, maps.slots, reader)
        here = jnp.arange(maps.num_rows, dtype=jnp.int32)
        return sum_groups(rows, route, here, here, probs, out_dtype, HERE)


class PeerSizes(NamedTuple):
    """Static sizes of an exchange. num_rows: of the tokens of a rank. capacity: the most rows of a rank; with the
    padding of their groups `padded`."""

    axis_name: Axes
    ranks: int
    num_rows: int
    capacity: int
    padded: int
    alignment: int

    @classmethod
    def of(cls, axis_name: Axes, rows: Any, experts: int, capacity_factor: float | None, alignment: int) -> "PeerSizes":
        """Raises ValueError if all ranks together have 2^31 padded rows."""
        op, (_, _, num_rows) = "dispatch", parts_of(rows)
        ranks = axis_size(op, axis_name)
        local = experts // ranks
        capacity = capacity_of(op, capacity_factor, num_rows, 1, ranks * most_rows(rows, local))
        padded = padded_rows(capacity, local, alignment)
        if ranks * max(padded, num_rows) >= 2**31:
            got = f"{ranks} ranks with {padded} padded rows"
            fail(ValueError, op, "capacity_factor", got, "allowed: fewer than 2^31 padded rows on all ranks")
        return cls(axis_name, ranks, num_rows, capacity, padded, alignment)

    @property
    def holds_all(self) -> bool:
        """Whether all rows of all ranks fit on one."""
        return self.capacity == self.ranks * self.num_rows


class Shared(NamedTuple):
    """What the ranks tell each other; int32, no gradient.

    counts (ranks, E): rows of each rank for each expert. order (ranks M + 1,): of the sorted rows of all ranks the slot
    across ranks, and -1; inverse (M,): the sorted row of each slot of this rank. Both are None for rows.
    """

    counts: jax.Array
    order: jax.Array | None
    inverse: jax.Array | None


class Taken(NamedTuple):
    """The rows of one exchange, (ranks, E) int32 each, as `Shared.counts`. before: rows of exchanges before it. rows:
    rows of this one, which follow them."""

    before: jax.Array
    rows: jax.Array


def share(rows: Any, counts: jax.Array, sizes: PeerSizes) -> Shared:
    """The only collectives of an exchange, 4 bytes a row."""
    num_rows, axis_name = sizes.num_rows, sizes.axis_name
    table = all_ranks(clip_counts(counts, num_rows)[None], axis_name)
    if not isinstance(rows, TokenReplicas):
        return Shared(table, None, None)
    # A slot beyond the rows of its rank is the row of another; row -1 is the appended -1.
    first = lax.axis_index(axis_name) * num_rows
    own = jnp.where((rows.order >= 0) & (rows.order < num_rows), rows.order + first, -1)
    return Shared(table, jnp.append(all_ranks(own, axis_name), -1), rows.inverse)


def fitting_rows(shared: Shared, sizes: PeerSizes) -> jax.Array:
    """The rows that fit the capacity, (ranks, E): of each rank's experts the first rows, of rank 0, 1, ... in each."""
    of_owners = shared.counts.T.reshape(sizes.ranks, -1)
    fitting = jnp.diff(jnp.minimum(jnp.cumsum(of_owners, 1), sizes.capacity), axis=1, prepend=0)
    return fitting.reshape(-1, sizes.ranks).T


def map_peers(shared: Shared, taken: Taken, sizes: PeerSizes) -> tuple[RowMap, SlotMaps]:
    """The maps of one exchange, in numbers across ranks: row_map (P,) of sorted rows, inverse (M,) of padded rows."""
    table, ranks, num_rows = shared.counts, sizes.ranks, sizes.num_rows
    rank, experts = lax.axis_index(sizes.axis_name), table.shape[1]
    local = experts // ranks

    # Of rank `owner` and its expert `local`: the rows of each source.
    fitting = taken.rows.T.reshape(ranks, local, ranks)
    group_sizes = jnp.maximum(-(-fitting.sum(2) // sizes.alignment), 1) * sizes.alignment
    # Experts after the last one of a round may have no room for a block.
    group_ends = jnp.minimum(jnp.cumsum(group_sizes, 1), sizes.padded)
    group_sizes = jnp.diff(group_ends, axis=1, prepend=0)
    first = (group_ends - group_sizes)[..., None] + jnp.cumsum(fitting, 2) - fitting

    # The positions of this rank's rows. Comparisons and sums as in `plan_exchange`.
    counts, begin, own = (jnp.take(x, rank, axis=0) for x in (table, taken.before, taken.rows))
    ends, row = jnp.cumsum(counts), jnp.arange(num_rows, dtype=jnp.int32)
    expert = jnp.minimum((row[:, None] >= ends[None]).sum(1, dtype=jnp.int32), experts - 1)
    position = row - (ends - counts + begin)[expert]
    own_first = jnp.take(first, rank, axis=2).reshape(-1)
    inverse = expert // local * sizes.padded + own_first[expert] + position
    inverse = jnp.where((position >= 0) & (position < own[expert]), inverse, -1)

    # The sources of this rank's padded rows: the last part that starts at or before a row has it, or nobody.
    position, starts = jnp.arange(sizes.padded, dtype=jnp.int32), jnp.take(first, rank, axis=0).reshape(-1)
    part = (position[:, None] >= starts[None]).sum(1, dtype=jnp.int32) - 1
    position -= starts[part]
    source = part % ranks
    before = (jnp.cumsum(table, 1) - table + taken.before)[source, rank * local + part // ranks]
    found = position < jnp.take(fitting, rank, axis=0).reshape(-1)[part]
    row_map = jnp.where(found, source * num_rows + before + position, -1)

    order, slots = row_map, inverse
    if shared.order is not None and shared.inverse is not None:
        order, slots = shared.order[row_map], inverse[shared.inverse]
    own_sizes, own_ends = (jnp.take(x, rank, axis=0) for x in (group_sizes, group_ends))
    maps = RowMap(*(x.astype(jnp.int32) for x in (row_map, inverse, own_sizes, own_ends)))
    overflow = (counts - begin - own).sum().astype(jnp.int32)
    return maps, SlotMaps(order.astype(jnp.int32), slots.astype(jnp.int32), overflow)
