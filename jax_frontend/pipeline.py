"""The pipeline around the experts: dispatch rows to the ranks of their experts, and combine the results.

    rows (M, K), or TokenReplicas --dispatch--> groups (P, K), padded_counts, route
    groups (P, N), route ---------combine-----> rows (M, N), or tokens (T, N)

    dispatch    quantize -> all-to-all -> gather into one padded group per local expert        backward: bf16
    combine     gather -> all-to-all [-> sum over each token's replicas]                       backward: MXFP8

A `Route` is a value: whoever holds it can combine. On one rank there is no exchange: dispatch gathers the replicas of a
token directly into the groups, and combine sums directly from them. So it is with transport="peer_memory", where the
maps lead across ranks (peer_exchange.py).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from ..core_kernels.replicas import Replicas, check_replicas_option
from . import ops
from ._checks import check_counts, check_floats, check_shape, check_size, check_type, check_vector, dtype_name
from ._mesh import Axes, axis_size
from ._shapes import Float, Float32, Int
from .ep import Exchange, TokenReplicas, check_replicas, exchange_rows, plan_exchange, room_of
from .gathers import HERE, Reader, gather, ungather
from .groups import laid_out
from .mx_array import MXArray, MXGradArray
from .ops import RowMap
from .overflow import OnOverflow, check_on_overflow, lost_rows, nan_gradients, nan_values
from .peer_exchange import PeerMaps, map_peers
from .peer_memory import Peers, Transport, check_transport
from .permute import spread
from .remat import ROWS, named
from .replicas import Copies, Way, exchange_copies, exchange_sums, map_copies, probs_of_copies, return_each, send_once
from .weighted_combine import combine_slots
from .weights import recipe_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """Where `dispatch` put each row; `combine` takes it.

    row_map: between received rows and padded groups. exchange: the all-to-all, None on one rank without a capacity.
    order, slots, top_k: the maps of `weighted_combine`; top_k is 0 for rows, which have none across ranks. recipe,
    top_k: static. copies: where a token goes once to each rank, how its copies lie. peers: with
    transport="peer_memory" the maps across ranks, of which row_map, order and slots are parts. lost: bool, (M,) of
    rows or (T, top_k) of tokens, the rows without room, which make NaN; None if all have room, or on_overflow="drop".
    """

    row_map: RowMap
    exchange: Exchange | None
    order: jax.Array | None
    slots: jax.Array | None
    recipe: Recipe = dataclasses.field(metadata={"static": True})
    top_k: int = dataclasses.field(default=0, metadata={"static": True})
    copies: Copies | None = None
    peers: PeerMaps | None = None
    lost: jax.Array | None = None

    @property
    def group_ends(self) -> jax.Array:
        """(local experts,) int32, the end of each padded group."""
        return self.row_map.group_ends

    @property
    def reader(self) -> Reader:
        """What reads rows by order and slots."""
        return HERE if self.peers is None else Peers(self.peers.axis_name)

    @property
    def overflow(self) -> jax.Array:
        """() int32, local rows that did not fit the capacity."""
        if self.peers is not None:
            return self.peers.overflow
        return jnp.zeros((), jnp.int32) if self.exchange is None else self.exchange.overflow


@jax.named_scope("mxep.dispatch")
def dispatch(
    rows: Float[jax.Array, "M K"] | TokenReplicas,
    counts: Int[jax.Array, " E"],
    *,
    recipe: Recipe | str = "mxfp8",
    axis_name: Axes | None = None,
    capacity: int | None = None,
    replicas: Replicas = "each",
    transport: Transport = "all_to_all",
    on_overflow: OnOverflow = "nan",
) -> tuple[Float[jax.Array, "P K"] | MXArray, Int[jax.Array, " G"], Route]:
    """Send rows to the ranks of their experts and lay them out in one padded group per local expert; differentiable.

    rows: (M, K) bf16 or fp32, sorted by expert; or TokenReplicas. K is a multiple of 32 if the recipe quantizes.
    counts: (E,) of an integer dtype, the rows of each expert; E is a multiple of the ranks, and rank r has the experts
        [r E / ranks, (r + 1) E / ranks).
    recipe: a `Recipe` or its name. The MXFP8 recipes quantize the rows here and send packed bytes.
    axis_name: a mesh axis of the enclosing shard_map, or a tuple of them; None is one rank.
    capacity: rows that each pair of ranks exchanges at most; None is all local rows, which never drops one.
    replicas: of TokenReplicas, how often a token crosses the wire to a rank with several of its experts. "each": a row
        per expert, both ways. "once": one row, from which that rank makes the others; their results come back each, and
        results and gradients are the same bytes. "summed": the results of a token on a rank are summed there as well,
        in fp32, and one row comes back, in the dtype of the groups. A pair of ranks then has room for min(T, capacity)
        rows of tokens.
    transport: "all_to_all": collectives of XLA. "peer_memory": on GPUs of one process kernels read the rows in the
        memory of the other GPUs, into their groups and, summed, into their tokens; elsewhere the same from an
        all-gather of the rows. The same bytes, with replicas="each". A rank then has room for `capacity` rows from each
        rank, which all ranks share.
    on_overflow: what a row that does not fit the capacity makes of its row or token after `combine`. "nan": NaN, in the
        result, in the gradient of the row or token, and in the gradient of its weight. "drop": zeros, in the sum of a
        token and in the gradients.

    Returns (groups, padded_counts, route): groups (P, K), an MXArray if the recipe quantizes, with padding rows of
    zeros; padded_counts (E / ranks,) int32, multiples of the recipe's alignment; route for `combine`. The gradient of
    the rows has their dtype. A row that does not fit the capacity is in no group; `route.overflow` counts such rows.

    >>> order, inverse, counts = sort_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3)
    >>> tokens = TokenReplicas(jnp.ones((2, 32)), order, inverse, top_k=2)
    >>> groups, padded_counts, route = dispatch(tokens, counts)
    >>> groups.shape, padded_counts.tolist(), combine(groups.dequantize(), route)[:, 0].tolist()
    ((128, 32), [32, 32, 32], [2.0, 2.0])

    Raises ValueError (shapes, a mesh axis that does not exist or does not divide E; counts that do not fit the rows in
    eager calls and under checkify) and TypeError (dtypes).
    """
    op, recipe = "dispatch", recipe_of("dispatch", recipe)
    x = rows.x if isinstance(rows, TokenReplicas) else rows
    check_floats(op, "rows", x, " or TokenReplicas")
    if x.ndim != 2:
        fail(ValueError, op, "rows", f"shape {x.shape}", "allowed: (M, K)")
    check_vector(op, "counts", counts)
    if isinstance(rows, TokenReplicas):
        check_replicas(op, rows)
    top_k = rows.top_k if isinstance(rows, TokenReplicas) else 0
    num_rows = x.shape[0] * max(top_k, 1)
    check_replicas_option(op, replicas)
    check_on_overflow(op, on_overflow)
    if capacity is not None:
        check_size(op, "capacity", capacity, 1)
    if replicas != "each" and not top_k:
        allowed = "allowed: 'each' for rows; TokenReplicas, whose rows are copies, take the others"
        fail(ValueError, op, "replicas", repr(replicas), allowed)
    if axis_name is None and capacity is None:
        return _on_one_rank(rows, x, counts, num_rows, recipe)
    check_transport(op, transport)
    limited = on_overflow == "nan" and room_of(capacity, num_rows) != num_rows
    if transport == "peer_memory" and axis_name is not None and axis_size(op, axis_name) > 1:
        if replicas != "each":
            allowed = "allowed: 'each' with transport='peer_memory'"
            fail(ValueError, op, "replicas", repr(replicas), allowed)
        tokens, sizes = rows if isinstance(rows, TokenReplicas) else None, {"num_rows": num_rows, "capacity": capacity}
        peers = map_peers(op, counts, tokens, axis_name, alignment=recipe.alignment, **sizes)
        lost = _lost(peers.row_map.inverse, counts, tokens) if limited else None
        return _laid_out(_marked(x, lost), peers.row_map, peers.order, peers.slots, recipe, top_k, peers, lost)
    exchange, lost = plan_exchange(counts, axis_name, num_rows=num_rows, capacity=capacity), None
    if limited:
        lost = _lost(exchange.slots, counts, rows if isinstance(rows, TokenReplicas) else None)
        x = _marked(x, lost)
        rows = dataclasses.replace(rows, x=x) if isinstance(rows, TokenReplicas) else x
    if isinstance(rows, TokenReplicas) and replicas != "each" and exchange.ep_degree > 1:
        return _once(rows, exchange, recipe, replicas == "summed", lost)
    direct = exchange.of_replicas(rows) if isinstance(rows, TokenReplicas) else exchange
    received = exchange_rows(op, x, direct, fwd=recipe.rounding if recipe.mx else None)
    row_map = exchange.map_rows(recipe.alignment)
    groups = _named(gather(op, received, row_map.row_map, row_map.inverse), row_map)
    order, slots = (rows.order, rows.inverse) if isinstance(rows, TokenReplicas) else (None, None)
    return groups, row_map.padded_counts, Route(row_map, exchange, order, slots, recipe, top_k, lost=lost)


def _lost(places: jax.Array, counts: jax.Array, tokens: TokenReplicas | None) -> jax.Array:
    """`Route.lost`, from the place of each sorted row."""
    lost = lost_rows(places, counts)
    return lost if tokens is None else lost[tokens.inverse].reshape(-1, tokens.top_k)


def _marked(x: jax.Array, lost: jax.Array | None) -> jax.Array:
    return x if lost is None else nan_gradients("dispatch", x, lost)


def _once(
    tokens: TokenReplicas, exchange: Exchange, recipe: Recipe, summed: bool, lost: jax.Array | None
) -> tuple[jax.Array | MXArray, jax.Array, Route]:
    """A copy of a token for each rank, and its replicas from there."""
    row_map = exchange.map_rows(recipe.alignment)
    copies = map_copies(tokens, exchange, row_map, summed)
    route = Route(row_map, exchange, tokens.order, tokens.inverse, recipe, tokens.top_k, copies, lost=lost)
    groups: Any
    if summed:
        arrived = exchange_copies(tokens.x, copies, recipe.rounding if recipe.mx else None)
        groups = spread("dispatch", arrived, copies.group_order, copies.group_slots.reshape(-1), tokens.top_k)
    else:
        groups = send_once(tokens.x, _way(route, copies))
    return _named(groups, row_map), row_map.padded_counts, route


def _named(groups: Any, row_map: RowMap) -> Any:
    """For policies of jax.checkpoint; MX rows with the ends of their groups."""
    return laid_out(named(groups, ROWS), row_map)


def _way(route: Route, copies: Copies) -> Way:
    """Of the copies of a token there, and of its replicas back."""
    assert route.exchange is not None
    assert route.slots is not None
    each = dataclasses.replace(route.exchange, slots=route.exchange.slots[route.slots], top_k=route.top_k)
    recipe, copy = route.recipe, copies.group_order // route.top_k
    return Way(copies.exchange, each, copy, route.row_map.inverse, recipe.mx, recipe.rounding)


def _on_one_rank(
    rows: jax.Array | TokenReplicas, x: jax.Array, counts: jax.Array, num_rows: int, recipe: Recipe
) -> tuple[jax.Array | MXArray, jax.Array, Route]:
    """One gather from tokens to padded groups, by the composition of the two maps."""
    if not counts.size:
        fail(ValueError, "dispatch", "counts", f"shape {counts.shape}", "allowed: (E,), one count per expert")
    check_counts("dispatch", counts, 1, num_rows, "counts")
    counts, experts = counts.astype(jnp.int32), counts.shape[0]
    row_map = ops.row_map(counts, num_rows=num_rows, num_local_experts=experts, alignment=recipe.alignment)
    order, slots, top_k = row_map.row_map, row_map.inverse, 0
    if isinstance(rows, TokenReplicas):
        # order[-1] is the appended -1: a padding row is the replica of no token.
        order, slots, top_k = jnp.append(rows.order, -1)[order], slots[rows.inverse], rows.top_k
    return _laid_out(x, row_map, order, slots, recipe, top_k)


def _laid_out(
    x: jax.Array,
    row_map: RowMap,
    order: jax.Array,
    slots: jax.Array,
    recipe: Recipe,
    top_k: int,
    peers: PeerMaps | None = None,
    lost: jax.Array | None = None,
) -> tuple[jax.Array | MXArray, jax.Array, Route]:
    """One gather from rows, or from tokens, to padded groups."""
    values: Any = MXArray.quantize(x, recipe.rounding) if recipe.mx else x
    route = Route(row_map, None, order, slots, recipe, top_k, peers=peers, lost=lost)
    groups = spread("dispatch", values, order, slots, max(top_k, 1), route.reader)
    return _named(groups, row_map), row_map.padded_counts, route


def dispatch_probs(
    probs: Float32[jax.Array, "T top_k"] | Float32[jax.Array, " M"], route: Route
) -> Float32[jax.Array, " P"]:
    """Send a weight per row where `dispatch` sent the row; differentiable.

    probs: (M,) float32; (T, top_k) for TokenReplicas. Returns (P,) float32, zeros for padding: the `prob` of
    `grouped_swiglu_ffn`. One all-to-all of 4 bytes a row, and one back for the gradient. Raises ValueError (shape) and
    TypeError (dtype).

    >>> order, inverse, counts = sort_by_expert(jnp.array([[1], [0]]), num_experts=2)
    >>> _, _, route = dispatch(TokenReplicas(jnp.ones((2, 32)), order, inverse, 1), counts)
    >>> dispatch_probs(jnp.array([[0.25], [0.5]]), route)[:64:32].tolist()
    [0.5, 0.25]
    """
    op = "dispatch_probs"
    check_type(op, "route", route, Route)
    num_rows = route.row_map.inverse.shape[0] if route.exchange is None else route.exchange.num_rows
    shape = (num_rows // route.top_k, route.top_k) if route.top_k else (num_rows,)
    check_shape(op, "probs", probs, shape, "one weight per row of the dispatch", "float32")
    probs = jnp.asarray(probs)
    if route.lost is not None:
        probs = nan_gradients(op, probs, route.lost)
    column = probs.reshape(-1, 1)
    if route.order is not None and route.slots is not None:
        column = gather(op, column, route.order, route.slots.reshape(-1), route.reader)
    if route.exchange is not None:
        column = exchange_rows(op, column, route.exchange)
        column = gather(op, column, route.row_map.row_map, route.row_map.inverse)
    return column[:, 0]


@jax.named_scope("mxep.combine")
def combine(
    groups: Float[jax.Array, "P N"] | MXGradArray,
    route: Route,
    probs: Float32[jax.Array, "T top_k"] | None = None,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[jax.Array, "M N"]:
    """Take expert outputs back to the ranks and rows that `dispatch` took them from; differentiable.

    groups: (P, N) bf16 or fp32, or an MXGradArray, whose gradient arrives as MXFP8 bytes. probs: of TokenReplicas,
    (T, top_k) float32, the weight of each replica in its token's sum; None is a weight of 1. out_dtype: bf16 or fp32;
    None is the dtype of groups.

    Returns (M, N) rows; or, of TokenReplicas, (T, N), each token's weighted sum over its replicas in fp32, rounded
    once; NaN for a row without room, as `dispatch` says. If the recipe quantizes, the gradient of groups is MXFP8,
    dequantized unless groups is an MXGradArray. Raises ValueError (shape) and TypeError (dtype).

    >>> groups, _, route = dispatch(jnp.ones((3, 32)), jnp.array([1, 2]))
    >>> combine(groups.dequantize(), route).shape
    (3, 32)
    """
    op = "combine"
    check_type(op, "route", route, Route)
    if not isinstance(groups, MXGradArray):
        check_floats(op, "groups", groups, " or an MXGradArray")
    rows_of_groups = route.row_map.row_map.shape[0]
    if len(groups.shape) != 2 or groups.shape[0] != rows_of_groups:
        fail(ValueError, op, "groups", f"shape {groups.shape}", f"allowed: ({rows_of_groups}, N), as dispatched")
    if probs is not None and not route.top_k:
        allowed = "allowed: None for rows; the sum over replicas, of TokenReplicas, is weighted"
        fail(ValueError, op, "probs", "an array", allowed)
    out_dtype = dtype_name(op, "out_dtype", groups.dtype if out_dtype is None else out_dtype)
    if probs is not None and route.slots is not None:
        shape = (route.slots.size // route.top_k, route.top_k)
        check_shape(op, "probs", probs, shape, "one weight per replica", "float32")
    if route.lost is None:
        return _combined(groups, route, probs, out_dtype)
    probs = None if probs is None else nan_gradients(op, jnp.asarray(probs), route.lost)
    return nan_values(op, _combined(groups, route, probs, out_dtype), route.lost)


def _combined(groups: Any, route: Route, probs: jax.Array | None, out_dtype: str) -> jax.Array:
    """`combine` without its checks, zeros for rows that found no room."""
    op, recipe, rows = "combine", route.recipe, groups
    if recipe.mx and not isinstance(rows, MXGradArray):
        rows = MXGradArray.wrap(rows)
    copies = route.copies
    if copies is not None and not copies.summed and probs is None:
        return return_each(rows, _way(route, copies), out_dtype)
    if copies is not None and copies.summed:
        if probs is not None and route.exchange is not None and route.order is not None and route.slots is not None:
            column = gather(op, jnp.asarray(probs).reshape(-1, 1), route.order, route.slots.reshape(-1))
            probs = probs_of_copies(column, route.exchange, copies)
        return exchange_sums(rows, probs, copies, out_dtype, recipe.rounding if recipe.mx else None)
    if route.exchange is not None:
        rows = ungather(op, rows, route.row_map.row_map, route.row_map.inverse)
        rows = rows if recipe.mx or not isinstance(rows, MXGradArray) else rows.value
        rows = exchange_rows(op, rows, route.exchange, back=True, bwd=recipe.rounding if recipe.mx else None)
        if route.order is None or route.slots is None:
            return rows.astype(out_dtype)
    assert route.order is not None
    assert route.slots is not None
    order, slots, reader = route.order, route.slots, route.reader
    if reader is not HERE and probs is not None:
        # The gradient of a weighted sum reads the rows again: they come here first.
        rows = ungather(op, rows, order, slots.reshape(-1), reader)
        order = slots = jnp.arange(slots.size, dtype=jnp.int32)
        reader = HERE
    slots = slots.reshape(-1, max(route.top_k, 1))
    options = {"out_dtype": out_dtype, "rounding": recipe.rounding, "reader": reader}
    return combine_slots(op, rows, probs, slots, order, **options)
