"""Expert parallelism inside `jax.shard_map`: the two all-to-alls of a MoE layer, with a static capacity.

    rank r's rows, sorted by expert          one part of `capacity` rows per destination rank
    | e0 e0 e1 | e2 e3 e3 e3 | ...   --->    | e0 e0 e1 __ | e2 e3 e3 e3 | ...  --all-to-all-->

    dispatch   x --quantize--> [q | sf] --gather--> parts ==u8==> MXArray          backward ==bf16==
    combine    y                                          ==bf16==> --gather--> rows   backward ==u8==

Every collective is one dense all_to_all over whole rows. XLA needs static sizes, so each part has room for
`capacity` rows: all local rows by default, which never drops one. With less room, rows that do not fit are
dropped: `Exchange.overflow` counts them, they come back from the combine as zeros, and their gradient is zero.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail, require_multiple
from . import ops
from ._checks import check_counts, check_floats, check_integers, check_size, check_type, rounding_of
from ._derivatives import arguments
from .combine import sum_slots
from .mx_array import MXArray, MXGradArray

Axes = str | tuple[str, ...]
"""One mesh axis or several, of which the first varies slowest."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Which row goes where in one all-to-all and back; made by `plan_exchange`, used by every function here.

    sources (ep * capacity,) int32: the local row in each slot of the send buffer, -1 for none.
    slots (T,) int32: the slot of each local row, -1 for a row that did not fit; (T * copies,) after `of_tokens`.
    recv_counts (E,) int32: rows received, per source rank and local expert.
    overflow () int32: local rows that did not fit.
    """

    sources: jax.Array
    slots: jax.Array
    recv_counts: jax.Array
    overflow: jax.Array
    axis_name: Axes | None = dataclasses.field(metadata={"static": True})
    ep_degree: int = dataclasses.field(metadata={"static": True})
    capacity: int = dataclasses.field(metadata={"static": True})
    copies: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def num_rows(self) -> int:
        """Local rows, T."""
        return self.slots.shape[0] // self.copies


def axis_size(op: str, axes: Axes | None, argument: str = "axis_name") -> int:
    """Ranks along mesh axes of the enclosing shard_map, 1 for None; ValueError if there is no such axis."""
    allowed = "allowed: a mesh axis of the enclosing jax.shard_map, a tuple of them, or None"
    names = axes if isinstance(axes, tuple) else (axes,)
    if axes is not None and not all(isinstance(name, str) for name in names):
        fail(TypeError, op, argument, repr(axes), allowed)
    try:
        return 1 if axes is None else lax.axis_size(axes)
    except NameError:
        fail(ValueError, op, argument, repr(axes), allowed)


def plan_exchange(
    num_tokens_per_expert: jax.Array, axis_name: Axes | None, *, num_rows: int, capacity: int | None = None
) -> Exchange:
    """Lay out the all-to-all of rows that are sorted by expert; exchanges the counts.

    num_tokens_per_expert: (E,) int32, local rows of each of the E experts; rank r of the mesh axis owns
        experts [r * E / ep, (r + 1) * E / ep). num_rows: T, local rows, at least the sum of the counts.
    axis_name: mesh axis of the enclosing shard_map, or a tuple of them; None for no parallelism, one rank.
    capacity: rows reserved per pair of ranks; None reserves num_rows and is dropless.

    Raises ValueError for a capacity below 1, or an axis whose size does not divide E; TypeError for counts that
    are no integers.
    """
    op = "plan_exchange"
    check_integers(op, "num_tokens_per_expert", num_tokens_per_expert)
    if num_tokens_per_expert.ndim != 1 or not num_tokens_per_expert.size:
        got = f"shape {num_tokens_per_expert.shape}"
        fail(ValueError, op, "num_tokens_per_expert", got, "allowed: (E,), one count per expert")
    check_size(op, "num_rows", num_rows)
    if capacity is not None:
        check_size(op, "capacity", capacity, 1)
    num_experts, ep_degree = num_tokens_per_expert.shape[0], axis_size(op, axis_name)
    if num_experts % ep_degree:
        fail(
            ValueError, op, "num_tokens_per_expert", f"{num_experts} experts",
            f"allowed: multiples of the {ep_degree} ranks of mesh axis {axis_name!r}",
        )  # fmt: skip
    check_counts(op, num_tokens_per_expert, 1, num_rows)
    capacity = num_rows if capacity is None else min(capacity, num_rows)

    counts = num_tokens_per_expert.astype(jnp.int32).reshape(ep_degree, -1)
    rank_ends = jnp.cumsum(counts.sum(1))
    rank_starts = rank_ends - counts.sum(1)
    # Of each destination's rows, sorted by expert, the first `capacity` go.
    fitting_ends = jnp.minimum(jnp.cumsum(counts, axis=1), capacity)
    fitting = jnp.diff(fitting_ends, axis=1, prepend=0)
    sent = fitting_ends[:, -1]

    slot = jnp.arange(capacity, dtype=jnp.int32)
    sources = jnp.where(slot < sent[:, None], rank_starts[:, None] + slot, -1).reshape(-1)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Not jnp.searchsorted: JAX 0.10.2 takes none where some mesh axes are automatic.
    rank = jnp.minimum((row[:, None] >= rank_ends).sum(1, dtype=jnp.int32), ep_degree - 1)
    place = row - rank_starts[rank]
    slots = jnp.where(place < sent[rank], rank * capacity + place, -1)
    return Exchange(
        sources=sources.astype(jnp.int32),
        slots=slots.astype(jnp.int32),
        recv_counts=_all_to_all(fitting, axis_name).reshape(-1),
        overflow=(counts - fitting).sum(),
        axis_name=axis_name,
        ep_degree=ep_degree,
        capacity=capacity,
    )


def of_tokens(exchange: Exchange, order: jax.Array, inverse: jax.Array, copies: int) -> Exchange:
    """The dispatch of T tokens straight to the wire, each to `copies` slots, without the copies in between.

    exchange: planned for the T * copies rows that are sorted by expert. order, inverse: (T * copies,) int32, as
    `sort_by_expert` returns them. The bytes on the wire are the same; what comes back, a gradient or through a combine,
    is summed over a token's slots in fp32 and rounded once.

    Raises ValueError unless order and inverse have one slot for each of the exchange's rows, whose number `copies`
    divides, TypeError for another kind of argument.
    """
    op = "of_tokens"
    check_type(op, "exchange", exchange, Exchange)
    if exchange.copies != 1:
        fail(ValueError, op, "exchange", "an exchange of tokens", "allowed: one of rows, as `plan_exchange` makes it")
    check_size(op, "copies", copies, 1)
    rows = exchange.num_rows
    if rows % copies:
        fail(ValueError, op, "copies", copies, f"allowed: divisors of {rows}, the exchange's rows")
    for name, slots in (("order", order), ("inverse", inverse)):
        check_integers(op, name, slots)
        if slots.shape != (rows,):
            fail(ValueError, op, name, f"shape {slots.shape}", f"allowed: ({rows},), one slot for each row")
    tokens = jnp.append(order, -1)[exchange.sources] // copies  # -1 picks the -1 appended, and stays -1
    return dataclasses.replace(exchange, sources=tokens, slots=exchange.slots[inverse], copies=copies)


def _all_to_all(x: jax.Array, axis_name: Axes | None) -> jax.Array:
    if axis_name is None:
        return x
    # XLA:CPU widens a bf16 collective to fp32; bits stay as narrow as they are, on every platform.
    bits = jnp.uint16 if x.dtype == jnp.bfloat16 else x.dtype
    sent = lax.bitcast_convert_type(x, bits)
    received = lax.all_to_all(sent, axis_name, split_axis=0, concat_axis=0, tiled=True)
    return lax.bitcast_convert_type(received, x.dtype)


def _send(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """(T, W) local rows -> (ep * capacity, W) rows received."""
    return _all_to_all(ops.permute_rows(rows, exchange.sources), exchange.axis_name)


def _send_back(rows: jax.Array, exchange: Exchange) -> jax.Array:
    """(ep * capacity, W) rows received -> (T, W) the local rows they came from, copies of a row summed."""
    rows = _all_to_all(rows, exchange.axis_name)
    if exchange.copies == 1:
        return ops.permute_rows(rows, exchange.slots)
    return sum_slots(rows, exchange.slots.reshape(-1, exchange.copies))


def _check_rows(op: str, x: jax.Array, rows: int, what: str, other: str = "") -> None:
    check_floats(op, "input", x, other)
    if len(x.shape) != 2 or x.shape[0] != rows:
        fail(ValueError, op, "input", f"shape {x.shape}", f"allowed: ({rows}, D), {what}")


# --- dispatch --------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dispatch(x: jax.Array, exchange: Exchange, rounding: Rounding) -> MXArray:
    return MXArray.from_packed(_send(ops.quantize_row_packed(x, rounding=rounding), exchange), x.dtype)


_dispatch.defvjp(
    lambda x, exchange, rounding: (_dispatch(x, exchange, rounding), exchange),
    lambda rounding, exchange, grad: (_send_back(grad.carrier, exchange), None),
)


def a2a_dispatch_mxfp8_fwd_hp_bwd(
    input: jax.Array, exchange: Exchange, scaling_mode: Rounding | str = Rounding.RCEIL
) -> MXArray:
    """Send rows to their experts' ranks: forward as packed MXFP8 bytes, backward as bf16 (or input's dtype).

    input: (T, D) bf16 or fp32, sorted by expert. Returns an MXArray (ep * capacity, D), for the permute: source rank
    s's rows start at s * capacity, and `exchange.recv_counts` says how many there are.

    Raises ValueError if D is no multiple of 32 or T is not what the exchange was planned for.
    """
    op = "a2a_dispatch_mxfp8_fwd_hp_bwd"
    check_type(op, "exchange", exchange, Exchange)
    _check_rows(op, input, exchange.num_rows, "the exchange's local rows")
    return _dispatch(*arguments(op, input, exchange), rounding_of(op, "scaling_mode", scaling_mode))


# --- combine ---------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _combine_mx(x: MXGradArray, exchange: Exchange, rounding: Rounding) -> jax.Array:
    return _send_back(x.value, exchange)


def _combine_mx_bwd(rounding, exchange, grad):
    rows = MXArray.from_packed(_send(ops.quantize_row_packed(grad, rounding=rounding), exchange))
    return MXGradArray.cotangent(None, (rows.q, rows.sf)), None


_combine_mx.defvjp(lambda x, exchange, rounding: (_combine_mx(x, exchange, rounding), exchange), _combine_mx_bwd)


@jax.custom_vjp
def _combine(x: jax.Array, exchange: Exchange) -> jax.Array:
    return _send_back(x, exchange)


_combine.defvjp(
    lambda x, exchange: (_combine(x, exchange), exchange), lambda exchange, grad: (_send(grad, exchange), None)
)


def a2a_combine_hp_fwd_mxfp8_bwd(
    input: jax.Array | MXGradArray,
    exchange: Exchange,
    scaling_mode: Rounding | str = Rounding.RCEIL,
    *,
    mxfp8_bwd: bool = True,
) -> jax.Array:
    """Send rows back to the ranks they came from: forward in input's dtype, backward as packed MXFP8 bytes.

    input: (ep * capacity, N), as dispatched. An MXGradArray hands the bytes of its gradient on to the grouped
    GEMM; for an array they are dequantized on arrival. mxfp8_bwd=False sends the gradient as it is.
    Returns (T, N); rows that did not fit are zeros.

    Raises ValueError if N is no multiple of 32 or the rows are not the exchange's.
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
        return _combine_mx(*arguments(op, input.once(op), exchange), rounding_of(op, "scaling_mode", scaling_mode))
    return _dequantized(*arguments(op, input, exchange), rounding_of(op, "scaling_mode", scaling_mode), "combine")


# --- MXFP8 on the wire, floats on both sides ---------------------------------------------------------


def _wire(x, exchange, rounding, back: bool):
    rows = ops.quantize_row_packed(x, rounding=rounding)
    rows = MXArray.from_packed(_send_back(rows, exchange) if back else _send(rows, exchange))
    return ops.dequantize(rows.q, rows.sf, out_dtype=x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dequantized(x: jax.Array, exchange: Exchange, rounding: Rounding, leg: str) -> jax.Array:
    return _send_back(x, exchange) if leg == "combine" else _wire(x, exchange, rounding, leg == "reverse")


_dequantized.defvjp(
    lambda x, exchange, rounding, leg: (_dequantized(x, exchange, rounding, leg), exchange),
    lambda rounding, leg, exchange, grad: (_wire(grad, exchange, rounding, leg == "forward"), None),
)


def to_mxfp8_a2a_dequant(
    input: jax.Array,
    exchange: Exchange,
    scaling_mode: Rounding | str = Rounding.RCEIL,
    *,
    reverse: bool = False,
) -> jax.Array:
    """A drop-in for a float all-to-all that has MXFP8 on the wire, forward and backward.

    input: (T, D) -> (ep * capacity, D); with reverse=True the way back, (ep * capacity, D) -> (T, D).
    bf16 or fp32 in, the same dtype out. Raises ValueError if D is no multiple of 32.
    """
    op = "to_mxfp8_a2a_dequant"
    check_type(op, "exchange", exchange, Exchange)
    check_type(op, "reverse", reverse, bool)
    rows = exchange.sources.shape[0] if reverse else exchange.num_rows
    _check_rows(op, input, rows, "the exchange's rows")
    leg = "reverse" if reverse else "forward"
    return _dequantized(*arguments(op, input, exchange), rounding_of(op, "scaling_mode", scaling_mode), leg)


def a2a_dispatch(input: jax.Array, exchange: Exchange) -> jax.Array:
    """`a2a_dispatch_mxfp8_fwd_hp_bwd` without MXFP8: (T, D) -> (ep * capacity, D), its gradient likewise."""
    op = "a2a_dispatch"
    check_type(op, "exchange", exchange, Exchange)
    _check_rows(op, input, exchange.num_rows, "the exchange's local rows")
    return _dispatch_hp(*arguments(op, input, exchange))


@jax.custom_vjp
def _dispatch_hp(x: jax.Array, exchange: Exchange) -> jax.Array:
    return _send(x, exchange)


_dispatch_hp.defvjp(
    lambda x, exchange: (_dispatch_hp(x, exchange), exchange),
    lambda exchange, grad: (_send_back(grad, exchange), None),
)
