"""Rows between ranks inside `jax.shard_map`: the all-to-alls of expert parallelism, with a static capacity.

    rows of rank r, sorted by expert         `capacity` rows per destination rank
    | e0 e0 e1 | e2 e3 e3 e3 | ...   --->    | e0 e0 e1 __ | e2 e3 e3 e3 | ...  --all-to-all-->

    dispatch   exchange_rows(fwd=...)    x --quantize--> [q | sf] --gather--> parts ==u8==> MXArray
                                         dx <--sum--           <--gather--         <==bf16==
    combine    exchange_rows(bwd=...)    the same, the other way round

Every exchange is one dense all_to_all over whole rows. XLA needs static sizes, so each pair of ranks has room for
`capacity` rows: all local rows by default, which have room. With less, rows that do not fit are dropped:
`Exchange.overflow` counts them, they are zeros after the combine, and their gradient is zero. A token is quantized
once: its replicas share the bytes. pipeline.py lays out the rows around these exchanges, and overflow.py makes the rows
without room NaN.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from . import ops
from ._checks import check_counts, check_floats, check_integers, check_matrix, check_shape, check_size, check_type
from ._derivatives import arguments
from ._mesh import Axes, axis_size
from ._shapes import Float, Int
from .gathers import Rows, gather
from .groups import laid_out, map_groups
from .mx_array import MXArray, MXGradArray
from .ops import RowMap
from .weighted_combine import sum_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """The layout of one all-to-all and of its reverse, made by `plan_exchange`.

    sources (ep * capacity,) int32: the local row in each slot of the send buffer, -1 for none.
    slots (M,) int32: the slot of each local row, -1 for a row that did not fit.
    recv_counts (E,) int32: rows received, per source rank and local expert.
    overflow () int32: local rows that did not fit.
    axis_name, ep_degree, capacity: the mesh axes, their ranks, the rows per pair of ranks; static.
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
    """The top_k replicas of each token of x (T, D), as rows sorted by expert.

    order (T * top_k,) int32: row i is a replica of token order[i] // top_k. inverse (T * top_k,) int32: the row of each
    replica. `sort_by_expert` returns both. A token is quantized once for all of its replicas. top_k is static.
    """

    x: jax.Array
    order: jax.Array
    inverse: jax.Array
    top_k: int = dataclasses.field(metadata={"static": True})


def check_replicas(op: str, tokens: TokenReplicas) -> None:
    """TypeError unless order and inverse are integers, ValueError unless they lay out top_k replicas of each token."""
    check_size(op, "top_k", tokens.top_k, 1)
    rows = tokens.x.shape[0] * tokens.top_k
    for name, slots in (("order", tokens.order), ("inverse", tokens.inverse)):
        check_shape(op, name, slots, (rows,), "top_k slots per token", "int")


def plan_exchange(
    counts: Int[jax.Array, " E"], axis_name: Axes | None, *, num_rows: int, capacity: int | None = None
) -> Exchange:
    """Lay out the all-to-all of rows that are sorted by expert. The ranks exchange their counts.

    counts: (E,) of an integer dtype, local rows of each expert; rank r of the mesh axis has the experts
        [r E / ranks, (r + 1) E / ranks). num_rows: M, local rows, at least the sum of the counts.
    axis_name: a mesh axis of the enclosing shard_map, or a tuple of them; None is one rank.
    capacity: rows per pair of ranks; None is num_rows, which never drops one.

    >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
    >>> exchange.sources.tolist(), exchange.recv_counts.tolist()
    ([0, 1, 2], [2, 1])

    Raises ValueError (a capacity below 1, a mesh axis whose size does not divide E) and TypeError (dtypes).
    """
    op = "plan_exchange"
    check_integers(op, "counts", counts)
    if counts.ndim != 1 or not counts.size:
        got = f"shape {counts.shape}"
        fail(ValueError, op, "counts", got, "allowed: (E,), one count per expert")
    check_size(op, "num_rows", num_rows)
    if capacity is not None:
        check_size(op, "capacity", capacity, 1)
    num_experts, ep_degree = counts.shape[0], axis_size(op, axis_name)
    if num_experts % ep_degree:
        fail(
            ValueError, op, "counts", f"{num_experts} experts",
            f"allowed: multiples of the {ep_degree} ranks of mesh axis {axis_name!r}",
        )  # fmt: skip
    check_counts(op, counts, 1, num_rows, "counts")
    capacity = room_of(capacity, num_rows)

    counts = counts.astype(jnp.int32).reshape(ep_degree, -1)
    rank_ends = jnp.cumsum(counts.sum(1))
    rank_starts = rank_ends - counts.sum(1)
    # The first `capacity` rows of each destination are sent.
    fitting_ends = jnp.minimum(jnp.cumsum(counts, axis=1), capacity)
    fitting = jnp.diff(fitting_ends, axis=1, prepend=0)
    sent = fitting_ends[:, -1]

    slot = jnp.arange(capacity, dtype=jnp.int32)
    sources = jnp.where(slot < sent[:, None], rank_starts[:, None] + slot, -1).reshape(-1)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Not jnp.searchsorted: JAX 0.10.2 refuses it if some mesh axes are automatic.
    rank = jnp.minimum((row[:, None] >= rank_ends).sum(1, dtype=jnp.int32), ep_degree - 1)
    place = row - rank_starts[rank]
    slots = jnp.where(place < sent[rank], rank * capacity + place, -1)
    return Exchange(
        sources=sources.astype(jnp.int32),
        slots=slots.astype(jnp.int32),
        recv_counts=all_to_all(fitting, axis_name).reshape(-1),
        overflow=(counts - fitting).sum(),
        axis_name=axis_name,
        ep_degree=ep_degree,
        capacity=capacity,
    )


def room_of(capacity: int | None, num_rows: int) -> int:
    """Rows of a pair of ranks. If num_rows is a symbol of jax.export the capacity stays: an op takes a number."""
    return num_rows if capacity is None or (isinstance(num_rows, int) and num_rows < capacity) else capacity


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


class _Legs(NamedTuple):
    """back: from the layout received to the local rows. fwd, bwd: the rounding of the quantized rows that a direction
    sends, None for rows as they are. floats: quantized rows are dequantized on arrival."""

    back: bool
    fwd: Rounding | None
    bwd: Rounding | None
    floats: bool


def _moved(x: jax.Array, plan: Exchange, back: bool, rounding: Rounding | None) -> jax.Array:
    rows = x if rounding is None else ops.quantize_row_packed(x, rounding=rounding)
    return send_back(rows, plan) if back else send_rows(rows, plan)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _exchange(x: Any, plan: Exchange, legs: _Legs) -> Any:
    x = x.value if isinstance(x, MXGradArray) else x
    rows = _moved(x, plan, legs.back, legs.fwd)
    if legs.fwd is None:
        return rows
    mx = MXArray.from_packed(rows, x.dtype)
    return ops.dequantize(mx.q, mx.sf, out_dtype=x.dtype) if legs.floats else mx


def _exchange_bwd(legs, plan, grad):
    grad = grad.carrier if isinstance(grad, MXArray) else grad
    rows = _moved(grad, plan, not legs.back, legs.bwd)
    if legs.bwd is None:
        return rows, None
    mx = MXArray.from_packed(rows)
    if legs.floats:
        return ops.dequantize(mx.q, mx.sf, out_dtype=grad.dtype), None
    return MXGradArray.cotangent(None, (mx.q, mx.sf)), None


_exchange.defvjp(lambda x, plan, legs: (_exchange(x, plan, legs), plan), _exchange_bwd)


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

    x: (M, W), or of the layout received, (ep * capacity, W). fwd, bwd: the rounding of rows that are quantized for
    their way forward and of gradients that are quantized for their way backward; None sends them as they are.
    Quantized rows arrive as an MXArray, and quantized gradients at an MXGradArray, which x then is; or with `floats`
    both are dequantized on arrival. The callers have checked the arguments.
    """
    x = x.once(op) if isinstance(x, MXGradArray) else x
    return _exchange(*arguments(op, x, plan), _Legs(back, fwd, bwd, floats))


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

    input: (M, D) bf16 or fp32, sorted by expert; or TokenReplicas, with M = T * top_k, which go from the tokens
        directly into the send buffer, and whose gradient is summed over a token's replicas in fp32 and rounded once.
    exchange: of `plan_exchange` for these M rows.

    Returns (P, D) of input's dtype, P = ep_degree * capacity, for `permute`: the rows of source rank s start at
    s * capacity, and `exchange.recv_counts` has their numbers. Raises ValueError (shapes) and TypeError (dtypes).

    >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
    >>> a2a_dispatch(jnp.ones((3, 32)), exchange).shape
    (3, 32)
    """
    op = "a2a_dispatch"
    check_type(op, "exchange", exchange, Exchange)
    return exchange_rows(op, *replicas_to_send(op, input, exchange))


def permute(
    x: Rows, num_tokens_per_expert: Int[jax.Array, " G"] | Exchange, group_size_multiple_of: int = BLOCK
) -> tuple[Rows, RowMap]:
    """Gather rows into one padded group per local expert.

    x: (R, K) bf16, fp32 or MXArray. num_tokens_per_expert: the Exchange that sent the rows, which says how they came
        from several ranks; or (G,) of an integer dtype, the sizes of groups that follow each other. For rows of several
        ranks that no Exchange sent, `ops.row_map` makes the maps and `gather_rows` takes them.
    group_size_multiple_of: a positive multiple of 32; an empty expert has one aligned group.

    Returns (rows (P, K) of x's kind, RowMap). P holds any split of R rows; padding rows are zeros. The gradient of an
    MXArray is a float array.

    >>> rows, row_map = permute(jnp.ones((3, 32)), jnp.array([2, 1]))
    >>> rows.shape, row_map.padded_counts.tolist()
    ((96, 32), [32, 32])

    Raises ValueError (shapes, counts that do not fit) and TypeError (dtypes).
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
