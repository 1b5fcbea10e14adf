"""Rows between ranks inside `jax.shard_map`: the all-to-alls of expert parallelism, with a static capacity.

    rows of rank r, sorted by expert         `capacity` rows per destination rank
    | e0 e0 e1 | e2 e3 e3 e3 | ...   --->    | e0 e0 e1 __ | e2 e3 e3 e3 | ...  --all-to-all-->

    dispatch   x --quantize--> [q | sf] --gather--> parts ==u8==> MXArray          backward ==bf16==
    combine    y                                          ==bf16==> --gather--> rows   backward ==u8==

Every exchange is one dense all_to_all over whole rows. XLA needs static sizes, so each pair of ranks has room for
`capacity` rows: all local rows by default, which have room. With less, rows that do not fit are dropped:
`Exchange.overflow` counts them, they are zeros after the combine, and their gradient is zero. A token is quantized
once: its replicas share the bytes. pipeline.py lays out the rows around these exchanges, and overflow.py makes the rows
without room NaN.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail, require_multiple
from . import ops
from ._checks import check_counts, check_floats, check_integers, check_shape, check_size, check_type, rounding_of
from ._derivatives import arguments
from ._mesh import Axes, axis_size
from ._shapes import Float, Int
from .mx_array import MXArray, MXGradArray
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


def _for_replicas(op: str, input: Any, exchange: Exchange) -> tuple[jax.Array, Exchange]:
    """The array to send, and the exchange that gathers it directly into the send buffer."""
    if not isinstance(input, TokenReplicas):
        _check_rows(op, input, exchange.num_rows, "the exchange's local rows", " or TokenReplicas")
        return input, exchange
    x, order, inverse, top_k = input.x, input.order, input.inverse, input.top_k
    check_floats(op, "input", x)
    check_replicas(op, input)
    if x.ndim != 2 or x.shape[0] * top_k != exchange.num_rows:
        allowed = f"allowed: (T, D) with T * top_k = {exchange.num_rows}, the exchange's local rows"
        fail(ValueError, op, "input", f"shape {x.shape} with top_k {top_k}", allowed)
    tokens = jnp.append(order, -1)[exchange.sources] // top_k  # a source of -1 picks the appended -1, and stays -1
    return x, dataclasses.replace(exchange, sources=tokens, slots=exchange.slots[inverse], top_k=top_k)


def _check_rows(op: str, x: Any, rows: int, what: str, other: str = "") -> None:
    check_floats(op, "input", x, other)
    if len(x.shape) != 2 or x.shape[0] != rows:
        fail(ValueError, op, "input", f"shape {x.shape}", f"allowed: ({rows}, D), {what}")


# --- dispatch --------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch_mx(x: jax.Array, exchange: Exchange, rounding: Rounding) -> MXArray:
    return MXArray.from_packed(send_rows(ops.quantize_row_packed(x, rounding=rounding), exchange), x.dtype)


dispatch_mx.defvjp(
    lambda x, exchange, rounding: (dispatch_mx(x, exchange, rounding), exchange),
    lambda rounding, exchange, grad: (send_back(grad.carrier, exchange), None),
)


def a2a_dispatch_mxfp8_fwd_hp_bwd(
    input: Float[jax.Array, "M D"] | TokenReplicas, exchange: Exchange, rounding: Rounding | str = Rounding.RCEIL
) -> MXArray:
    """Quantize rows and send them to the ranks of their experts; the gradient comes back in input's dtype.

    input: (M, D) bf16 or fp32, sorted by expert; or TokenReplicas, with M = T * top_k, which go from the tokens
    directly
        into the send buffer, and whose gradient is summed over a token's replicas in fp32 and rounded once.
    exchange: of `plan_exchange` for these M rows. rounding: a `Rounding` or its name.

    Returns an MXArray (ep_degree * capacity, D) for `permute_mxfp8_fwd_hp_bwd`: the rows of source rank s start at
    s * capacity, and `exchange.recv_counts` has their numbers.

    >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
    >>> a2a_dispatch_mxfp8_fwd_hp_bwd(jnp.ones((3, 32)), exchange).dequantize().sum().item()
    96.0

    Raises ValueError (shapes; D no multiple of 32) and TypeError (dtypes).
    """
    op = "a2a_dispatch_mxfp8_fwd_hp_bwd"
    check_type(op, "exchange", exchange, Exchange)
    x, exchange = _for_replicas(op, input, exchange)
    return dispatch_mx(*arguments(op, x, exchange), rounding_of(op, "rounding", rounding))


# --- combine ---------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _combine_mx(x: MXGradArray, exchange: Exchange, rounding: Rounding) -> jax.Array:
    return send_back(x.value, exchange)


def _combine_mx_bwd(rounding, exchange, grad):
    rows = MXArray.from_packed(send_rows(ops.quantize_row_packed(grad, rounding=rounding), exchange))
    return MXGradArray.cotangent(None, (rows.q, rows.sf)), None


_combine_mx.defvjp(lambda x, exchange, rounding: (_combine_mx(x, exchange, rounding), exchange), _combine_mx_bwd)


@jax.custom_vjp
def _combine(x: jax.Array, exchange: Exchange) -> jax.Array:
    return send_back(x, exchange)


_combine.defvjp(
    lambda x, exchange: (_combine(x, exchange), exchange), lambda exchange, grad: (send_rows(grad, exchange), None)
)


def a2a_combine_hp_fwd_mxfp8_bwd(
    input: Float[jax.Array, "P N"] | MXGradArray,
    exchange: Exchange,
    rounding: Rounding | str = Rounding.RCEIL,
    *,
    mxfp8_bwd: bool = True,
) -> Float[jax.Array, "M N"]:
    """Send expert outputs back to the tokens' ranks as they are; the gradient is sent in MXFP8.

    input: (P, N), P = ep_degree * capacity, in the layout of the dispatch; an array, whose gradient is dequantized on
        arrival, or an MXGradArray, whose gradient stays MXFP8 bytes for the grouped GEMM.
    exchange: of the dispatch. rounding: a `Rounding` or its name. mxfp8_bwd: False sends the gradient in its own dtype.

    Returns (M, N) of input's dtype; rows that did not fit are zeros. Raises ValueError (shapes; N no multiple of 32)
    and TypeError (dtypes).

    >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
    >>> a2a_combine_hp_fwd_mxfp8_bwd(jnp.ones((3, 32)), exchange).shape
    (3, 32)
    """
    op = "a2a_combine_hp_fwd_mxfp8_bwd"
    check_type(op, "exchange", exchange, Exchange)
    check_type(op, "mxfp8_bwd", mxfp8_bwd, bool)
    values = input.value if isinstance(input, MXGradArray) else input
    _check_rows(op, values, exchange.sources.shape[0], "ep_degree * capacity rows", " or an MXGradArray")
    if not mxfp8_bwd:
        return _combine(*arguments(op, values, exchange))
    require_multiple(op, "input", input.shape[1], BLOCK, "last dim", "the backward quantizes along it")
    if isinstance(input, MXGradArray):
        return _combine_mx(*arguments(op, input.once(op), exchange), rounding_of(op, "rounding", rounding))
    return _dequantized(*arguments(op, input, exchange), rounding_of(op, "rounding", rounding), "combine")


# --- MXFP8 on the wire, floats on both sides ---------------------------------------------------------


def _wire(x, exchange, rounding, back: bool):
    rows = ops.quantize_row_packed(x, rounding=rounding)
    rows = MXArray.from_packed(send_back(rows, exchange) if back else send_rows(rows, exchange))
    return ops.dequantize(rows.q, rows.sf, out_dtype=x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dequantized(x: jax.Array, exchange: Exchange, rounding: Rounding, leg: str) -> jax.Array:
    return send_back(x, exchange) if leg == "combine" else _wire(x, exchange, rounding, leg == "reverse")


_dequantized.defvjp(
    lambda x, exchange, rounding, leg: (_dequantized(x, exchange, rounding, leg), exchange),
    lambda rounding, leg, exchange, grad: (_wire(grad, exchange, rounding, leg == "forward"), None),
)


def to_mxfp8_a2a_dequant(
    input: Float[jax.Array, "M D"],
    exchange: Exchange,
    rounding: Rounding | str = Rounding.RCEIL,
    *,
    reverse: bool = False,
) -> Float[jax.Array, "P D"]:
    """All-to-all with MXFP8 on the wire in both directions and input's dtype at both ends.

    input: (M, D) bf16 or fp32 -> (P, D), P = ep_degree * capacity; with reverse=True (P, D) -> (M, D).
    exchange, rounding: as in `a2a_dispatch_mxfp8_fwd_hp_bwd`. Raises ValueError (shapes; D no multiple of 32) and
    TypeError (dtypes).

    >>> exchange = plan_exchange(jnp.array([1]), None, num_rows=1)
    >>> to_mxfp8_a2a_dequant(jnp.full((1, 32), 1.06), exchange)[0, 0].item()
    1.0
    """
    op = "to_mxfp8_a2a_dequant"
    check_type(op, "exchange", exchange, Exchange)
    check_type(op, "reverse", reverse, bool)
    rows = exchange.sources.shape[0] if reverse else exchange.num_rows
    _check_rows(op, input, rows, "the exchange's rows")
    leg = "reverse" if reverse else "forward"
    return _dequantized(*arguments(op, input, exchange), rounding_of(op, "rounding", rounding), leg)


def a2a_dispatch(input: Float[jax.Array, "M D"] | TokenReplicas, exchange: Exchange) -> Float[jax.Array, "P D"]:
    """Send rows to the ranks of their experts as they are, forward and backward.

    input, exchange: as in `a2a_dispatch_mxfp8_fwd_hp_bwd`, D of any size. Returns (P, D) of input's dtype,
    P = ep_degree * capacity. Raises ValueError (shapes) and TypeError (dtypes).

    >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
    >>> a2a_dispatch(jnp.ones((3, 32)), exchange).shape
    (3, 32)
    """
    op = "a2a_dispatch"
    check_type(op, "exchange", exchange, Exchange)
    return dispatch_rows(*arguments(op, *_for_replicas(op, input, exchange)))


@jax.custom_vjp
def dispatch_rows(x: jax.Array, exchange: Exchange) -> jax.Array:
    return send_rows(x, exchange)


dispatch_rows.defvjp(
    lambda x, exchange: (dispatch_rows(x, exchange), exchange),
    lambda exchange, grad: (send_back(grad, exchange), None),
)
