"""Rows between tokens and padded groups. Every step is one gather, forward and backward.

    sort_by_expert   experts (T, K) --> order, inverse (T K,), counts (E,)
    spread_rows      x (T, D) --order // top_k--> rows (T K, D), sorted by expert     backward: sum over K
    gather_rows      rows (M, K) --row_map------> padded groups (P, K)                backward: inverse
                     groups (P, N) --inverse----> rows (M, N)                         backward: row_map

    forward    MXArray --permute--> MXArray  --> experts -->  MXGradArray --unpermute--> MXGradArray
                (M, K)               (P, K)                     (P, N)                     (M, N)
    backward    bf16  <--gather----  bf16   <-- experts <--   MXFP8      <--gather-----  MXFP8

Rows in front of the experts are MXFP8 forward and bf16 backward, rows behind them the other way round, so no row is
dequantized and quantized again between the network and the grouped products. A -1 in a map is padding, a row of zeros.
The MXFP8 names are those of torchao's expert-parallel functions.
"""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from . import ops, peer_memory
from ._call import jitted
from ._checks import (
    check_counts,
    check_floats,
    check_integers,
    check_matrix,
    check_shape,
    check_size,
    check_type,
    check_values,
    check_vector,
    warn_caller,
)
from ._derivatives import arguments
from ._shapes import Float, Int
from .ep import Exchange
from .mx_array import MXArray, MXGradArray, pack
from .ops import ExpertOrder, RowMap
from .peer_memory import Across
from .weighted_combine import sum_slots

Rows = TypeVar("Rows", jax.Array, MXArray)


def sort_by_expert(expert_ids: Int[jax.Array, "T top_k"] | Int[jax.Array, " S"], num_experts: int) -> ExpertOrder:
    """Sort the slots of a routing by expert, stably.

    expert_ids: (T, top_k) or (S,) of an integer dtype, values in [0, num_experts): the expert of slot t * top_k + k.
    Returns an `ExpertOrder`: order (S,), the slot of each row; inverse (S,), the row of each slot; counts
    (num_experts,).

    >>> sort_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3).order.tolist()
    [1, 0, 2, 3]

    Raises TypeError (dtype) and ValueError (shape).
    """
    op = "sort_by_expert"
    check_integers(op, "expert_ids", expert_ids)
    if expert_ids.ndim not in (1, 2):
        fail(ValueError, op, "expert_ids", f"shape {expert_ids.shape}", "allowed: (T, top_k) or (S,)")
    check_size(op, "num_experts", num_experts, 1)
    return ops.sort_by_expert(jnp.asarray(expert_ids).reshape(-1).astype(jnp.int32), num_experts)


# --- permute ---------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather_mx(mx: MXArray, row_map: jax.Array, inverse: jax.Array, across: Across) -> MXArray:
    return _mapped(mx, row_map, across)


def _mapped(mx: MXArray, row_map: jax.Array, across: Across) -> MXArray:
    packed = mx.packed()
    rows = MXArray.from_bytes(*peer_memory.permute_mx(packed, row_map, across), mx.dtype)
    return rows.gathered_from(packed, row_map) if across is None else rows


def _gather_mx_bwd(across, inverse, grad: MXArray):
    return MXArray.cotangent(peer_memory.permute_rows(grad.carrier, inverse, across)), None, None


_gather_mx.defvjp(
    lambda mx, row_map, inverse, across: (_gather_mx(mx, row_map, inverse, across), inverse), _gather_mx_bwd
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _gather(x: jax.Array, row_map: jax.Array, inverse: jax.Array, across: Across) -> jax.Array:
    return peer_memory.permute_rows(x, row_map, across)


_gather.defvjp(
    lambda x, row_map, inverse, across: (_gather(x, row_map, inverse, across), inverse),
    lambda across, inverse, grad: (peer_memory.permute_rows(grad, inverse, across), None, None),
)


def permute_mxfp8_fwd_hp_bwd(
    mx: MXArray, num_tokens_per_expert: Int[jax.Array, " G"] | Exchange, group_size_multiple_of: int = BLOCK
) -> tuple[MXArray, RowMap]:
    """Gather MX rows into one padded group per local expert.

    mx: (R, K) MXArray. num_tokens_per_expert: the Exchange that sent the rows, which says how they came from several
        ranks; or (G,) of an integer dtype, the sizes of groups that follow each other. For rows of several ranks that
        no Exchange sent, `ops.row_map` makes the maps and `gather_rows` takes them.
    group_size_multiple_of: a positive multiple of 32; an empty expert has one aligned group.

    Returns (MXArray (P, K), RowMap). P holds any split of R rows; padding rows are zeros. The gradient of the rows is a
    float array.

    >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
    >>> received = a2a_dispatch_mxfp8_fwd_hp_bwd(jnp.ones((3, 32)), exchange)
    >>> rows, row_map = permute_mxfp8_fwd_hp_bwd(received, exchange)
    >>> rows.shape, row_map.group_ends.tolist()
    ((96, 32), [32, 64])

    Raises ValueError (shapes, counts that do not fit) and TypeError (dtypes).
    """
    op = "permute_mxfp8_fwd_hp_bwd"
    if not isinstance(mx, MXArray):
        fail(TypeError, op, "mx", type(mx).__name__, "allowed: an MXArray; `permute` takes float rows")
    maps = _row_map(op, "mx", mx, num_tokens_per_expert, group_size_multiple_of)
    return gather_rows(mx, maps.row_map, maps.inverse).laid_out(maps.group_ends), maps


def permute(
    x: Rows, num_tokens_per_expert: Int[jax.Array, " G"] | Exchange, group_size_multiple_of: int = BLOCK
) -> tuple[Rows, RowMap]:
    """`permute_mxfp8_fwd_hp_bwd` for rows of any kind: bf16, fp32 or an MXArray. The result has the kind of x.

    >>> rows, row_map = permute(jnp.ones((3, 32)), jnp.array([2, 1]))
    >>> rows.shape, row_map.padded_counts.tolist()
    ((96, 32), [32, 32])
    """
    op = "permute"
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    maps = _row_map(op, "x", x, num_tokens_per_expert, group_size_multiple_of)
    rows = gather_rows(x, maps.row_map, maps.inverse)
    return rows.laid_out(maps.group_ends) if isinstance(rows, MXArray) else rows, maps


def pad_groups(x: Any, group_ends: jax.Array, alignment: int) -> tuple[Any, RowMap]:
    """Pad each group to a multiple of `alignment` rows; the unpermute removes the padding."""
    # Inside jit no check of values stops wrong ends: they are clipped, so that counts fit the rows.
    ends = jax.lax.cummax(jnp.clip(group_ends, 0, x.shape[0]))
    return permute(x, jnp.diff(ends, prepend=0), alignment)


def ends_of(op: str, group_ends: Any, group_sizes: Any, x: jax.Array | MXArray, groups: int) -> jax.Array:
    """The ends (groups,) of the groups of x: group_ends, or those of the RowMap or Route that laid out x, or the sums
    of group_sizes. An MXArray that was laid out brings its own: a product follows these, and others are an error where
    their values are known.

    Raises TypeError (dtype) and ValueError (shape, both or none of ends and sizes, other ends, a Route of other rows).
    """
    rows, own = x.shape[0], x.group_ends if isinstance(x, MXArray) else None
    if (group_ends is None) == (group_sizes is None):
        got = "none" if group_ends is None else "both"
        fail(ValueError, op, "group_ends, group_sizes", got, "allowed: one of them, the ends or the counts of groups")
    maps = group_ends if isinstance(group_ends, RowMap) else getattr(group_ends, "row_map", None)
    by_hand = group_ends is not None and not isinstance(maps, RowMap)
    if isinstance(maps, RowMap):
        if maps.row_map.shape[0] != rows:
            got = f"those of {maps.row_map.shape[0]} rows"
            fail(ValueError, op, "group_ends", got, f"allowed: the RowMap or Route that laid out these {rows} rows")
        group_ends = maps.group_ends
    elif group_ends is None:
        group_ends = ends_of_sizes(op, group_sizes, rows, groups, "weights")
    check_shape(op, "group_ends", group_ends, (groups,), "one end per group of the weights", "int")
    given = jnp.asarray(group_ends)
    if own is None and by_hand:
        _warn_if_sizes(op, given, rows)
    if own is None or own is given:
        return given
    check_shape(op, "group_ends", given, own.shape, "those of x", "int")
    check_values(
        (given == own).all(), op, "group_ends", given, "allowed: those of x; pass the RowMap or Route of its rows"
    )
    return own


def ends_of_sizes(op: str, group_sizes: Any, rows: int, groups: int, of: str) -> jax.Array:
    """(groups,) int32: the ends of groups of group_sizes rows. Raises TypeError (dtype) and ValueError (shape, counts
    that do not fit the rows)."""
    check_shape(op, "group_sizes", group_sizes, (groups,), f"one count per group of the {of}", "int")
    check_counts(op, group_sizes, 1, rows, "group_sizes")
    return jnp.cumsum(jnp.asarray(group_sizes).astype(jnp.int32), dtype=jnp.int32)


def _warn_if_sizes(op: str, group_ends: jax.Array, rows: int) -> None:
    """In an eager call, where the last end is known: counts in place of ends leave most rows out."""
    if not group_ends.size or not rows:
        return
    few = group_ends[-1].astype(jnp.int32) < (rows + 1) // 2
    if not isinstance(few, Tracer) and few:
        text = (
            "{}: group_ends: the last end is {} of {} rows, and the rows past it give zeros; counts go to group_sizes="
        )
        warn_caller(text.format(op, group_ends[-1], rows))


def _row_map(op: str, name: str, x: Any, counts: Any, alignment: int) -> RowMap:
    check_matrix(op, name, x)
    check_size(op, "group_size_multiple_of", alignment, BLOCK)
    rank_rows = 0
    if isinstance(counts, Exchange):
        counts, ranks, rank_rows = counts.recv_counts, counts.ep_degree, counts.capacity
        if x.shape[0] != ranks * rank_rows:
            allowed = f"allowed: {ranks * rank_rows} rows, what the exchange dispatched"
            fail(ValueError, op, name, f"shape {x.shape}", allowed)
        num_local_experts = counts.shape[0] // ranks
    else:
        check_integers(op, "num_tokens_per_expert", counts, " or an Exchange")
        if counts.ndim != 1 or not counts.size:
            fail(ValueError, op, "num_tokens_per_expert", f"shape {counts.shape}", "allowed: (G,), or an Exchange")
        check_counts(op, counts, 1, x.shape[0])
        num_local_experts = counts.shape[0]
    return ops.row_map(
        counts.astype(jnp.int32),
        num_rows=x.shape[0],
        num_local_experts=num_local_experts,
        alignment=alignment,
        rank_rows=rank_rows,
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _spread(x: jax.Array, order: jax.Array, slots: jax.Array, top_k: int, across: Across) -> jax.Array:
    return peer_memory.permute_rows(x, order // top_k, across)


_spread.defvjp(
    lambda x, order, slots, top_k, across: (_spread(x, order, slots, top_k, across), slots),
    lambda top_k, across, slots, grad: (sum_slots(grad, slots.reshape(-1, top_k), across), None, None),
)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _spread_mx(mx: MXArray, order: jax.Array, slots: jax.Array, top_k: int, across: Across) -> MXArray:
    return _mapped(mx, order // top_k, across)


_spread_mx.defvjp(
    lambda mx, order, slots, top_k, across: (_spread_mx(mx, order, slots, top_k, across), slots),
    lambda top_k, across, slots, grad: (
        MXArray.cotangent(sum_slots(grad.carrier, slots.reshape(-1, top_k), across)),
        None,
        None,
    ),
)


def spread_rows(
    x: Rows, order: Int[jax.Array, " P"], inverse: Int[jax.Array, " T*top_k"], top_k: int, *, across: Across = None
) -> Rows:
    """Replicate each token for its top_k experts: out[i] = x[order[i] // top_k], zeros where order is -1.

    x: (T, D) bf16, fp32 or MXArray. order: (P,), the slot t * top_k + k of each row of the result. inverse:
    (T * top_k,), the row of each slot; both int32, P = T * top_k for those of `sort_by_expert`.
    across: mesh axes of the enclosing shard_map: slot s of rank q has the number q T top_k + s in order, row i of rank
    q the number q P + i in inverse.
    Returns (P, D) of x's kind. The gradient of a token is the fp32 sum over its replicas, rounded once.

    >>> spread_rows(jnp.array([[1.0], [2.0]]), jnp.array([2, 0, 1, 3]), jnp.array([1, 2, 0, 3]), 2).tolist()
    [[2.0], [1.0], [1.0], [2.0]]

    Raises ValueError (shapes) and TypeError (dtypes).
    """
    op = "spread_rows"
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    check_size(op, "top_k", top_k, 1)
    check_matrix(op, "x", x)
    check_vector(op, "order", order)
    check_shape(op, "inverse", inverse, (x.shape[0] * top_k,), "x's rows, `top_k` times", "int")
    across = peer_memory.check_across(op, across)
    spread: Any = _spread_mx if isinstance(x, MXArray) else _spread
    return spread(*arguments(op, x, order, inverse), top_k, across)


def gather_rows(
    x: Rows, row_map: Int[jax.Array, " P"], inverse: Int[jax.Array, " M"], *, across: Across = None
) -> Rows:
    """Return x[row_map], zeros where the map is -1; the gradient goes through `inverse`.

    x: (M, K) bf16, fp32 or MXArray. row_map: (P,), inverse: (M,), the map back; both int32. across: mesh axes of the
    enclosing shard_map: row r of rank q has the number q M + r in row_map, row i the number q P + i in inverse. Returns
    (P, K) of x's kind.

    >>> gather_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, -1, 0]), jnp.array([2, 0])).tolist()
    [[2.0], [0.0], [1.0]]

    Raises ValueError (shapes) and TypeError (dtypes).
    """
    op = "gather_rows"
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    check_matrix(op, "x", x)
    check_vector(op, "row_map", row_map)
    check_shape(op, "inverse", inverse, x.shape[:1], "the rows of x", "int")
    across = peer_memory.check_across(op, across)
    gather: Any = _gather_mx if isinstance(x, MXArray) else _gather
    return gather(*arguments(op, x, row_map, inverse), across)


# --- un-permute ------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ungather_mx(x: MXGradArray, row_map: jax.Array, inverse: jax.Array, across: Across) -> MXGradArray:
    return MXGradArray.of(peer_memory.permute_rows(x.value, inverse, across))


def _ungather_mx_fwd(x, row_map, inverse, across):
    # With symbolic_zeros every leaf is (value, perturbed).
    return _ungather_mx(MXGradArray.of(x.value.value), row_map.value, inverse.value, across), row_map.value


def _ungather_mx_bwd(across, row_map, grad: MXGradArray):
    value, mx = grad.parts()
    value = None if value is None else peer_memory.permute_rows(value, row_map, across)
    mx = None if mx is None else peer_memory.permute_mx(pack(*mx), row_map, across)
    return MXGradArray.cotangent(value, mx, grad.uses), None, None


_ungather_mx.defvjp(_ungather_mx_fwd, _ungather_mx_bwd, symbolic_zeros=True)
_ungather_mx_jitted = jitted(_ungather_mx, 3)


def unpermute_hp_fwd_mxfp8_bwd(
    input: Float[jax.Array, "P N"] | MXGradArray, maps: RowMap, *, across: Across = None
) -> Float[jax.Array, "R N"] | MXGradArray:
    """Gather expert outputs back into the order in which the rows were received; rows without a token are zeros.

    input: (P, N), an array, or an MXGradArray, whose gradient is gathered as MXFP8 bytes. maps: the RowMap of the
    permute. across: as in `gather_rows`. Returns (R, N) of input's kind. Raises ValueError (shapes) and TypeError
    (dtypes).

    >>> rows, row_map = permute(jnp.ones((3, 32)), jnp.array([2, 1]))
    >>> unpermute_hp_fwd_mxfp8_bwd(rows, row_map).shape
    (3, 32)
    """
    op = "unpermute_hp_fwd_mxfp8_bwd"
    if not isinstance(input, MXGradArray):
        check_floats(op, "input", input, " or an MXGradArray")
    check_type(op, "maps", maps, RowMap)
    if len(input.shape) != 2 or input.shape[0] != maps.row_map.shape[0]:
        allowed = f"allowed: ({maps.row_map.shape[0]}, N), the rows of maps.row_map"
        fail(ValueError, op, "input", f"shape {input.shape}", allowed)
    if isinstance(input, MXGradArray):
        input, across = input.once(op), peer_memory.check_across(op, across)
        return _ungather_mx_jitted(*arguments(op, input, maps.row_map, maps.inverse), across)
    return gather_rows(input, maps.inverse, maps.row_map, across=across)
