"""Rows between ranks inside `jax.shard_map`: the all-to-alls of expert parallelism, with a static capacity.

    rows of rank r, sorted by expert         `capacity` rows per destination rank
    | e0 e0 e1 | e2 e3 e3 e3 | ...   --->    | e0 e0 e1 __ | e2 e3 e3 e3 | ...  --all-to-all-->

    dispatch   exchange_rows(fwd=...)    x --quantize--> [q | sf] --gather--> parts ==u8==> MXArray
                                         dx <--sum--           <--gather--         <==bf16==
    combine    exchange_rows(bwd=...)    the same, the other way round

Every exchange is one dense all_to_all over whole rows. XLA needs static sizes, so each pair of ranks has a buffer of
`capacity` rows, by default as many as local rows. Rows above the capacity are dropped: `Exchange.overflow` counts them,
they are zeros after the combine, and their gradient is zero. overflow.py makes dropped rows NaN. A token is quantized
once: its replicas share the bytes.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...core_kernels.formats import Rounding
from ...core_kernels.launch import fail
from ...core_kernels.policy.overflow import OnOverflow
from ...core_kernels.policy.recipe import Recipe
from .. import ops
from ..ops import RowMap
from ..ops.checks import check_counts, check_integers, check_shape, check_size, clip_counts
from ..ops.derivatives import arguments
from ..ops.mesh import Axes, axis_size
from ..ops.mx_array import MXArray, MXGradArray
from ..ops.shapes import Int
from ..products.gathers import gather, ungather
from ..routing.overflow import capacity_of, lost_rows, nan_gradients
from ..routing.weighted_combine import combine_slots, sum_slots
from .route import Route, named_groups


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """The layout of one all-to-all and of its reverse, made by `plan_exchange`.

    Attributes:
        sources: (ep * capacity,) int32, the local row in each slot of the send buffer, -1 for none.
        slots: (M,) int32, the slot of each local row, -1 for a row that did not fit.
        recv_counts: (E,) int32, rows received, per source rank and local expert.
        overflow: () int32, local rows that did not fit.
        axis_name: the mesh axes, static.
        ep_degree: the ranks of the mesh axes, static.
        capacity: rows per pair of ranks, static.
        top_k: more than 1 in the exchange of a token's replicas alone, whose sources are tokens; static.
    """

    sources: jax.Array
    slots: jax.Array
    recv_counts: jax.Array
    overflow: jax.Array
    axis_name: Axes | None = dataclasses.field(metadata={"static": True})
    ep_degree: int = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    top_k: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Local rows, M."""
        return self.slots.shape[0]

    def of_replicas(self, tokens: "TokenReplicas") -> "Exchange":
        """The exchange that gathers the tokens directly into the send buffer."""
        rows = jnp.append(tokens.order, -1)[self.sources] // tokens.top_k  # a source of -1 stays -1
        return dataclasses.replace(self, sources=rows, slots=self.slots[tokens.inverse], top_k=tokens.top_k)

    def map_rows(self, alignment: int) -> RowMap:
        """Between the rows received and one padded group per local expert."""
        return ops.row_map(
            self.recv_counts, num_rows=self.ep_degree * self.capacity, alignment=alignment, rank_rows=self.capacity,
            num_local_experts=self.recv_counts.shape[0] // self.ep_degree,
        )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenReplicas:
    """The top_k replicas of each token, as rows sorted by expert.

    `sort_by_expert` returns order and inverse. A token is quantized once for all of its replicas.

    Args:
        x: (T, D) bf16 or fp32, the tokens.
        order: (T * top_k,) int32. Row i is a replica of token order[i] // top_k.
        inverse: (T * top_k,) int32, the row of each replica.
        top_k: experts per token, static.
        distinct: whether the experts of each token differ, static. Then a rank has room for at most as many rows of a
            token as it has experts: with fewer than top_k experts, fewer rows if no `capacity_factor` is given.

    Example:
        >>> order, inverse, counts = sort_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3)
        >>> tokens = TokenReplicas(jnp.ones((2, 32)), order, inverse, top_k=2)
        >>> dispatch(tokens, counts)[1].tolist()
        [32, 32, 32]
    """

    x: jax.Array
    order: jax.Array
    inverse: jax.Array
    top_k: int = dataclasses.field(metadata={"static": True})
    distinct: bool = dataclasses.field(default=False, metadata={"static": True})


def parts_of(rows: Any) -> tuple[jax.Array, int, int]:
    """The array, top_k and the number of rows, of TokenReplicas; of other rows with a top_k of 0."""
    if isinstance(rows, TokenReplicas):
        return rows.x, rows.top_k, rows.x.shape[0] * rows.top_k
    return rows, 0, rows.shape[0]


def most_rows(rows: Any, local: int) -> int:
    """The most rows of a rank for a rank of `local` experts."""
    x, top_k, num_rows = parts_of(rows)
    fewer = isinstance(rows, TokenReplicas) and rows.distinct and 0 < local < top_k
    return x.shape[0] * local if fewer else num_rows


def check_replicas(op: str, tokens: TokenReplicas) -> None:
    """TypeError unless order and inverse are integers, ValueError unless they have top_k slots per token."""
    check_size(op, "top_k", tokens.top_k, 1)
    rows = tokens.x.shape[0] * tokens.top_k
    for name, slots in (("order", tokens.order), ("inverse", tokens.inverse)):
        check_shape(op, name, slots, (rows,), "top_k slots per token", "int")


def plan_exchange(
    counts: Int[jax.Array, " E"], axis_name: Axes | None, *, num_rows: int, capacity: int | None = None
) -> Exchange:
    """Plan the all-to-all of rows that are sorted by expert. The ranks exchange their counts.

    Args:
        counts: (E,) of an integer dtype, local rows of each expert; rank r of the mesh axis has the experts [r E /
            ranks, (r + 1) E / ranks).
        axis_name: a mesh axis of the enclosing shard_map, or a tuple of them; None is one rank.
        num_rows: M, local rows, at least the sum of the counts.
        capacity: rows per pair of ranks; None is num_rows, which never drops one.

    Returns:
        The layout, as `a2a_dispatch` takes it.

    Raises:
        ValueError: a capacity below 1, a mesh axis whose size does not divide E.
        TypeError: dtypes.

    Example:
        >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
        >>> exchange.sources.tolist(), exchange.recv_counts.tolist()
        ([0, 1, 2], [2, 1])
    """
    op = "plan_exchange"
    check_size(op, "num_rows", num_rows)
    if capacity is not None:
        check_size(op, "capacity", capacity, 1)
    check_expert_counts(op, counts, axis_name, num_rows)
    return lay_out(counts, axis_name, num_rows, num_rows if capacity is None else _least(num_rows, capacity))


def check_expert_counts(op: str, counts: Any, axis_name: Axes | None, num_rows: int) -> None:
    """TypeError unless counts are integers; ValueError unless they are one per expert, in equal parts of the ranks, and
    sum to at most num_rows, where values are known."""
    check_integers(op, "counts", counts)
    if counts.ndim != 1 or not counts.size:
        fail(ValueError, op, "counts", f"shape {counts.shape}", "allowed: (E,), one count per expert")
    if counts.shape[0] % (ranks := axis_size(op, axis_name)):
        allowed = f"allowed: multiples of the {ranks} ranks of mesh axis {axis_name!r}"
        fail(ValueError, op, "counts", f"{counts.shape[0]} experts", allowed)
    check_counts(op, counts, 1, num_rows, "counts")


def lay_out(counts: jax.Array, axis_name: Axes | None, num_rows: int, capacity: int) -> Exchange:
    """`plan_exchange` for checked arguments."""
    ep_degree = axis_size("plan_exchange", axis_name)
    counts = counts if axis_name is None else clip_counts(counts, num_rows)  # no other rank waits for one that raises
    counts = counts.astype(jnp.int32).reshape(ep_degree, -1)
    rank_ends = jnp.cumsum(counts.sum(1))
    rank_starts = rank_ends - counts.sum(1)
    # The first `capacity` rows of each destination are sent.
    fitting_ends = jnp.minimum(jnp.cumsum(counts, axis=1), capacity)
    fitting = jnp.diff(fitting_ends, axis=1, prepend=0)
    sent = fitting_ends[:, -1]

    slot = jnp.arange(capacity, dtype=jnp.int32)[None]
    sources = jnp.where(slot < sent[:, None], rank_starts[:, None] + slot, -1).reshape(-1)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Not jnp.searchsorted: JAX 0.10.2 refuses it if some mesh axes are automatic.
    rank = jnp.minimum((row[:, None] >= rank_ends[None]).sum(1, dtype=jnp.int32), ep_degree - 1)
    position = row - rank_starts[rank]
    slots = jnp.where(position < sent[rank], rank * capacity + position, -1)
    return Exchange(
        sources=sources.astype(jnp.int32),
        slots=slots.astype(jnp.int32),
        recv_counts=all_to_all(fitting, axis_name).reshape(-1),
        overflow=(counts - fitting).sum(),
        axis_name=axis_name,
        ep_degree=ep_degree,
        capacity=capacity,
    )


def _least(num_rows: int, capacity: int) -> int:
    """The capacity if num_rows is a symbol of jax.export: an op takes a number."""
    return min(num_rows, capacity) if isinstance(num_rows, int) else capacity


def lost_of(
    rows: Any, counts: jax.Array, positions: jax.Array, whole: bool, on_overflow: OnOverflow
) -> jax.Array | None:
    """`Route.lost`, from the position of each sorted row in the buffers, -1 for none. whole: every routing fits."""
    if on_overflow == "drop" or whole:
        return None
    lost = lost_rows(positions, counts)
    return lost[rows.inverse].reshape(-1, rows.top_k) if isinstance(rows, TokenReplicas) else lost


def all_to_all(x: jax.Array, axis_name: Axes | None) -> jax.Array:
    """Equal parts of x between the ranks; no gradient."""
    if axis_name is None:
        return x
    # XLA:CPU widens a bf16 collective to fp32, but not a collective over uint16.
    bits = jnp.uint16 if x.dtype == jnp.bfloat16 else x.dtype
    sent = lax.bitcast_convert_type(x, bits)
    received = lax.all_to_all(sent, axis_name, split_axis=0, concat_axis=0, tiled=True)
    return lax.bitcast_convert_type(received, x.dtype)


def send_rows(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """(M, W) local rows -> (ep * capacity, W) rows received; no gradient."""
    return all_to_all(ops.permute_rows(rows, exchange.sources), exchange.axis_name)


def send_back(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """(ep * capacity, W) rows received -> (M, W) local rows; of replicas (T, W), the sum over each token's replicas.
    No gradient."""
    rows = all_to_all(rows, exchange.axis_name)
    if exchange.top_k == 1:
        return ops.permute_rows(rows, exchange.slots)
    return sum_slots(rows, exchange.slots.reshape(-1, exchange.top_k))


# --- differentiable ----------------------------------------------------------------------------------


class _Transfers(NamedTuple):
    """back: from received rows to local rows. fwd, bwd: the rounding of the quantized rows that the transfer of a pass
    sends, None for rows as they are. floats: received rows are dequantized."""

    back: bool
    fwd: Rounding | None
    bwd: Rounding | None
    floats: bool


def _moved(x: jax.Array, plan: Exchange, back: bool, rounding: Rounding | None) -> jax.Array:
    rows = x if rounding is None else ops.quantize_row_packed(x, rounding=rounding)
    return send_back(rows, plan) if back else send_rows(rows, plan)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _exchange(x: Any, plan: Exchange, transfers: _Transfers) -> Any:
    x = x.value if isinstance(x, MXGradArray) else x
    rows = _moved(x, plan, transfers.back, transfers.fwd)
    if transfers.fwd is None:
        return rows
    mx = MXArray.from_packed(rows, x.dtype)
    return ops.dequantize(mx.q, mx.sf, out_dtype=x.dtype) if transfers.floats else mx


def _exchange_bwd(transfers, plan, grad):
    grad = grad.carrier if isinstance(grad, MXArray) else grad
    rows = _moved(grad, plan, not transfers.back, transfers.bwd)
    if transfers.bwd is None:
        return rows, None
    mx = MXArray.from_packed(rows)
    if transfers.floats:
        return ops.dequantize(mx.q, mx.sf, out_dtype=grad.dtype), None
    return MXGradArray.cotangent(None, (mx.q, mx.sf)), None


_exchange.defvjp(lambda x, plan, transfers: (_exchange(x, plan, transfers), plan), _exchange_bwd)


def exchange_rows(
    op: str,
    x: Any,
    plan: Exchange,
    *,
    back: bool = False,
    fwd: Rounding | None = None,
    bwd: Rounding | None = None,
    floats: bool = False,
) -> Any:
    """Send rows to the ranks of their experts, or with `back` expert outputs to the ranks of their tokens.

    x: (M, W), or with `back` (ep * capacity, W). fwd, bwd: the rounding that quantizes rows in the forward pass and
    gradients in the backward pass; None sends them as they are. Quantized rows are received as an MXArray. If gradients
    are quantized, x is an MXGradArray. With `floats` received rows and gradients are dequantized instead. The callers
    have checked the arguments.
    """
    x = x.once(op) if isinstance(x, MXGradArray) else x
    return _exchange(*arguments(op, x, plan), _Transfers(back, fwd, bwd, floats))


# --- the exchange of a layer -------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sent:
    """plan: the all-to-all of the rows. tokens: order and inverse of TokenReplicas, None for rows. copies: the maps of
    the copies if a token is sent once to each rank, else None."""

    plan: Exchange
    tokens: tuple[jax.Array, jax.Array] | None
    copies: Any

    @property
    def num_rows(self) -> int:
        return self.plan.num_rows

    @property
    def overflow(self) -> jax.Array:
        return self.plan.overflow


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Collectives of XLA, on any number of processes, with a row per replica in both directions. replicas.py has the
    policies that send a token once to each rank. capacity_factor: as of `dispatch`."""

    axis_name: Axes | None
    capacity_factor: float | None
    on_overflow: OnOverflow

    def dispatch(self, rows: Any, counts: jax.Array, recipe: Recipe) -> tuple[Any, Route]:
        x, top_k, num_rows = parts_of(rows)
        ranks = axis_size("dispatch", self.axis_name)
        most = most_rows(rows, counts.shape[0] // ranks)
        capacity = capacity_of("dispatch", self.capacity_factor, num_rows, ranks, most)
        plan = lay_out(counts, self.axis_name, num_rows, capacity)
        lost = lost_of(rows, counts, plan.slots, capacity == num_rows, self.on_overflow)
        x, tokens = nan_gradients("dispatch", x, lost), None
        if isinstance(rows, TokenReplicas):
            tokens = rows.order, rows.inverse
        groups, row_map, copies = self.send(x, rows, plan, recipe)
        route = Route(row_map, Sent(plan, tokens, copies), self, recipe, top_k, lost)
        return named_groups(groups, row_map), route

    def send(self, x: jax.Array, rows: Any, plan: Exchange, recipe: Recipe) -> tuple[Any, RowMap, Any]:
        """Rows or tokens x to groups (P, K), their map, and `Sent.copies`. rows: TokenReplicas, or no tokens."""
        direct = plan.of_replicas(rows) if isinstance(rows, TokenReplicas) else plan
        received = exchange_rows("dispatch", x, direct, fwd=recipe.rounding if recipe.mx else None)
        row_map = plan.map_rows(recipe.alignment)
        return gather("dispatch", received, row_map.row_map, row_map.inverse), row_map, None

    def dispatch_probs(self, op: str, probs: jax.Array, route: Route) -> jax.Array:
        rows = exchange_rows(op, sorted_probs(op, probs, route), route.maps.plan)
        return gather(op, rows, route.row_map.row_map, route.row_map.inverse)

    def combine(self, groups: Any, route: Route, probs: jax.Array | None, out_dtype: str) -> jax.Array:
        op, recipe, sent = "combine", route.recipe, route.maps
        rows = ungather(op, groups, route.row_map.row_map, route.row_map.inverse)
        rows = exchange_rows(op, rows, sent.plan, back=True, bwd=recipe.rounding if recipe.mx else None)
        if sent.tokens is None:
            return rows.astype(out_dtype)
        order, slots = sent.tokens
        return combine_slots(op, rows, probs, slots.reshape(-1, route.top_k), order, out_dtype=out_dtype)


def sorted_probs(op: str, probs: jax.Array, route: Route) -> jax.Array:
    """(M, 1), a weight per row, or per slot of TokenReplicas -> (M, 1) in the order of the rows."""
    if route.maps.tokens is None:
        return probs
    order, slots = route.maps.tokens
    return gather(op, probs, order, slots)
