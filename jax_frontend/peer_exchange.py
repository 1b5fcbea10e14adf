"""Dispatch and combine through memory of peers: where each row of each rank lies, in numbers across ranks.

    tokens (T, K) of all ranks --one gather, by `order`--> padded groups (P, K) of this rank's experts
    tokens (T, N) <--one sum, by `slots`-- padded groups (P, N) of all ranks

The ranks exchange their counts and, of tokens, the orders of their replicas: 4 bytes a row. Every rank then knows the
rows of its groups, and the places of its own rows in the groups of all. The groups have the rows of rank 0, 1, ..., as
those of the all-to-all. peer_memory.py reads the rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.launch import fail
from ..core_kernels.routing.plan import padded_rows
from ._checks import check_counts
from ._mesh import Axes, axis_size
from .ep import TokenReplicas, room_of
from .ops import RowMap
from .peer_memory import all_ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PeerMaps:
    """Maps across the ranks of `axis_name`, static.

    row_map: between the sorted rows (M) of the ranks and their padded groups (P): row_map (P,) has numbers of sorted
        rows, inverse (M,) of padded rows.
    order (P,) int32: the number of the slot t * top_k + k of each padded row; of rows, row_map.row_map. slots (M,)
        int32: the number of the padded row of each slot; -1 is none in both.
    overflow () int32: local rows that did not fit.
    """

    row_map: RowMap
    order: jax.Array
    slots: jax.Array
    overflow: jax.Array
    axis_name: Axes = dataclasses.field(metadata={"static": True})


def map_peers(
    op: str,
    counts: jax.Array,
    tokens: TokenReplicas | None,
    axis_name: Axes,
    *,
    num_rows: int,
    capacity: int | None,
    alignment: int,
) -> PeerMaps:
    """The maps of one dispatch. A rank has room for `capacity` rows from each rank, shared by all of them."""
    ranks, rank, experts = axis_size(op, axis_name), lax.axis_index(axis_name), counts.shape[0]
    if experts % ranks:
        allowed = f"allowed: multiples of the {ranks} ranks of mesh axis {axis_name!r}"
        fail(ValueError, op, "counts", f"{experts} experts", allowed)
    check_counts(op, counts, 1, num_rows, "counts")
    local, room = experts // ranks, ranks * room_of(capacity, num_rows)
    padded = padded_rows(room, local, alignment)
    if ranks * max(padded, num_rows) >= 2**31:
        got = f"{ranks} ranks with {padded} padded rows"
        fail(ValueError, op, "capacity", got, "allowed: fewer than 2^31 padded rows on all ranks")
    # Wrong counts are clipped: inside jit nothing checks them, and a row must not leave its rank's memory.
    ends = jnp.minimum(jnp.cumsum(jnp.clip(counts.astype(jnp.int32), 0, num_rows)), num_rows)
    counts = jnp.diff(ends, prepend=0)
    table = all_ranks(counts[None], axis_name)

    # Of rank `owner` and its expert `local`: the rows that each source has for it, and those that fit.
    sent = table.T.reshape(ranks, local * ranks)
    fitting = jnp.diff(jnp.minimum(jnp.cumsum(sent, 1), room), axis=1, prepend=0).reshape(ranks, local, ranks)
    sizes = jnp.maximum(-(-fitting.sum(2) // alignment), 1) * alignment
    group_ends = jnp.cumsum(sizes, 1)
    first = (group_ends - sizes)[..., None] + jnp.cumsum(fitting, 2) - fitting

    # The places of this rank's rows. Comparisons and sums as in `plan_exchange`.
    row = jnp.arange(num_rows, dtype=jnp.int32)
    expert = jnp.minimum((row[:, None] >= ends).sum(1, dtype=jnp.int32), experts - 1)
    place = row - (ends - counts)[expert]
    own_first, own_fitting = (jnp.take(x, rank, axis=2).reshape(-1) for x in (first, fitting))
    inverse = expert // local * padded + own_first[expert] + place
    inverse = jnp.where(place < own_fitting[expert], inverse, -1)

    # The sources of this rank's padded rows: the last part that starts at or before a row has it, or nobody.
    place, starts = jnp.arange(padded, dtype=jnp.int32), jnp.take(first, rank, axis=0).reshape(-1)
    part = (place[:, None] >= starts).sum(1, dtype=jnp.int32) - 1
    place -= starts[part]
    source = part % ranks
    before = (jnp.cumsum(table, 1) - table)[source, rank * local + part // ranks]
    found = place < jnp.take(fitting, rank, axis=0).reshape(-1)[part]
    row_map = jnp.where(found, source * num_rows + before + place, -1)

    order, slots = row_map, inverse
    if tokens is not None:
        # A slot beyond the rows of its rank is the row of another; row -1 is the appended -1.
        own = jnp.where((tokens.order >= 0) & (tokens.order < num_rows), tokens.order + rank * num_rows, -1)
        order, slots = jnp.append(all_ranks(own, axis_name), -1)[row_map], inverse[tokens.inverse]
    own_sizes, own_ends = (jnp.take(x, rank, axis=0) for x in (sizes, group_ends))
    maps = RowMap(*(x.astype(jnp.int32) for x in (row_map, inverse, own_sizes, own_ends)))
    overflow = (counts - own_fitting).sum().astype(jnp.int32)
    return PeerMaps(maps, order.astype(jnp.int32), slots.astype(jnp.int32), overflow, axis_name)
