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

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from . import ops
from ._call import jitted
from ._checks import (
    check_counts,
    check_floats,
    check_integers,
    check_matrix,
    check_shape,
    check_size,
    check_type,
    check_vector,
)
from ._derivatives import arguments
from ._shapes import Float, Int
from .ep import Exchange
from .mx_array import MXArray, MXGradArray, pack
from .ops import ExpertOrder, RowMap
from .weighted_combine import sum_slots

Rows = TypeVar("Rows", jax.Array, MXArray)


def sort_by_expert(expert_ids: Int[jax.Array, "T top_k"] | Int[jax.Array, " S"], num_experts: int) -> ExpertOrder:
    """Sort the slots of a routing by expert, stably.

    expert_ids: (T, top_k) or (S,) of an integer dtype, values in [0, num_experts): the expert of slot t * top_k + k.
    Returns an `ExpertOrder`: order (S,), the slot of each row; inverse (S,), the row of each slot; counts
    (num_experts,).

    >>> sort_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3).order.tolist()
    [1, 0, 2, 3]

    Raises TypeError (dtype).
    """
    check_integers("sort_by_expert", "expert_ids", expert_ids)
    check_size("sort_by_expert", "num_experts", num_experts, 1)
    return ops.sort_by_expert(jnp.asarray(expert_ids).reshape(-1).astype(jnp.int32), num_experts)


# --- permute ---------------------------------------------------------------------------------------


@jax.custom_vjp
def _gather_mx(mx: MXArray, row_map: jax.Array, inverse: jax.Array) -> MXArray:
    q, sf = ops.permute_mx(mx.packed(), row_map)
    return MXArray.from_bytes(q, sf, mx.dtype)


def _gather_mx_bwd(inverse, grad: MXArray):
    return MXArray.cotangent(ops.permute_rows(grad.carrier, inverse)), None, None


_gather_mx.defvjp(lambda mx, row_map, inverse: (_gather_mx(mx, row_map, inverse), inverse), _gather_mx_bwd)


@jax.custom_vjp
def _gather(x: jax.Array, row_map: jax.Array, inverse: jax.Array) -> jax.Array:
    return ops.permute_rows(x, row_map)


_gather.defvjp(
    lambda x, row_map, inverse: (_gather(x, row_map, inverse), inverse),
    lambda inverse, grad: (ops.permute_rows(grad, inverse), None, None),
)


def permute_mxfp8_fwd_hp_bwd(
    mx: MXArray,
    num_tokens_per_expert: Int[jax.Array, " ranks*G"] | Exchange,
    ep_degree: int | None = None,
    num_local_experts: int | None = None,
    group_size_multiple_of: int = BLOCK,
    *,
    rank_rows: int | None = None,
) -> tuple[MXArray, RowMap]:
    """Gather received MX rows, rank-major, into one padded group per local expert.

    mx: (R, K) MXArray. num_tokens_per_expert: the Exchange that sent the rows, which implies the other arguments:
        `permute_mxfp8_fwd_hp_bwd(received, exchange)`. For other rows: (ep_degree * num_local_experts,) of an integer
        dtype, the counts received, rank-major.
    rank_rows: rows of each rank's part of mx; 0 if the parts follow each other without slack.
    group_size_multiple_of: a positive multiple of 32; an empty expert has one aligned group.

    Returns (MXArray (P, K), RowMap). P holds any split of R rows; padding rows are zeros. The gradient of the rows is a
    float array.

    >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
    >>> received = a2a_dispatch_mxfp8_fwd_hp_bwd(jnp.ones((3, 32)), exchange)
    >>> rows, row_map = permute_mxfp8_fwd_hp_bwd(received, exchange)
    >>> rows.shape, row_map.group_ends.tolist()
    ((96, 32), [32, 64])

    Raises ValueError (shapes, counts that do not fit, several ranks without rank_rows) and TypeError (dtypes).
    """
    op = "permute_mxfp8_fwd_hp_bwd"
    if not isinstance(mx, MXArray):
        fail(TypeError, op, "mx", type(mx).__name__, "allowed: an MXArray; `permute` takes float rows")
    maps = _row_map(op, mx, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of, rank_rows)
    return _gather_mx(*arguments(op, mx, maps.row_map, maps.inverse)), maps


def permute(
    x: Rows,
    num_tokens_per_expert: Int[jax.Array, " ranks*G"] | Exchange,
    ep_degree: int | None = None,
    num_local_experts: int | None = None,
    group_size_multiple_of: int = BLOCK,
    *,
    rank_rows: int | None = None,
) -> tuple[Rows, RowMap]:
    """`permute_mxfp8_fwd_hp_bwd` for rows of any kind: bf16, fp32 or an MXArray. The result has the kind of x.

    >>> rows, row_map = permute(jnp.ones((3, 32)), jnp.array([2, 1]), 1, 2)
    >>> rows.shape, row_map.padded_counts.tolist()
    ((96, 32), [32, 32])
    """
    op = "permute"
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    maps = _row_map(op, x, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of, rank_rows)
    return gather_rows(x, maps.row_map, maps.inverse), maps


def pad_groups(x: Any, group_ends: jax.Array, alignment: int) -> tuple[Any, RowMap]:
    """Pad each group to a multiple of `alignment` rows; the unpermute removes the padding."""
    # Inside jit no check of values stops wrong ends: they are clipped, so that counts fit the rows.
    ends = jax.lax.cummax(jnp.clip(group_ends, 0, x.shape[0]))
    return permute(x, jnp.diff(ends, prepend=0), 1, group_ends.shape[0], alignment)


def ends_of(op: str, group_ends: Any, rows: int) -> Any:
    """group_ends, or those of the RowMap or Route that laid out the rows; ValueError if it laid out others."""
    maps = getattr(group_ends, "row_map", None) if not isinstance(group_ends, RowMap) else group_ends
    if not isinstance(maps, RowMap):
        return group_ends
    if maps.row_map.shape[0] != rows:
        got = f"those of {maps.row_map.shape[0]} rows"
        fail(ValueError, op, "group_ends", got, f"allowed: the RowMap or Route that laid out these {rows} rows")
    return maps.group_ends


def _row_map(op, x, counts, ep_degree, num_local_experts, alignment, rank_rows) -> RowMap:
    argument = "mx" if isinstance(x, MXArray) else "x"
    check_matrix(op, argument, x)
    if isinstance(counts, Exchange):
        if (ep_degree, num_local_experts, rank_rows) != (None, None, None):
            got = "an Exchange beside ep_degree, num_local_experts or rank_rows"
            fail(ValueError, op, "num_tokens_per_expert", got, "allowed: the Exchange alone, which implies them")
        exchange = counts
        counts, ep_degree, rank_rows = exchange.recv_counts, exchange.ep_degree, exchange.capacity
        num_local_experts = counts.shape[0] // ep_degree
        if x.shape[0] != ep_degree * rank_rows:
            allowed = f"allowed: {ep_degree * rank_rows} rows, what the exchange dispatched"
            fail(ValueError, op, argument, f"shape {x.shape}", allowed)
    check_integers(op, "num_tokens_per_expert", counts, " or an Exchange")
    check_size(op, "ep_degree", ep_degree, 1)
    check_size(op, "num_local_experts", num_local_experts, 1)
    if rank_rows is None and ep_degree > 1:
        allowed = "allowed: the rows of each rank's part, 0 if they have no slack; or pass the Exchange for the counts"
        fail(ValueError, op, "rank_rows", f"none for {ep_degree} ranks", allowed)
    rank_rows = rank_rows or 0
    check_size(op, "rank_rows", rank_rows)
    check_size(op, "group_size_multiple_of", alignment, BLOCK)
    if counts.shape != (ep_degree * num_local_experts,):
        allowed = f"allowed: ({ep_degree * num_local_experts},), ep_degree * num_local_experts"
        fail(ValueError, op, "num_tokens_per_expert", f"shape {counts.shape}", allowed)
    check_counts(op, counts, ep_degree if rank_rows else 1, rank_rows or x.shape[0])
    return ops.row_map(
        counts.astype(jnp.int32),
        num_rows=x.shape[0],
        num_local_experts=num_local_experts,
        alignment=alignment,
        rank_rows=rank_rows,
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x: jax.Array, order: jax.Array, slots: jax.Array, top_k: int) -> jax.Array:
    return ops.permute_rows(x, order // top_k)


_spread.defvjp(
    lambda x, order, slots, top_k: (_spread(x, order, slots, top_k), slots),
    lambda top_k, slots, grad: (sum_slots(grad, slots.reshape(-1, top_k)), None, None),
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread_mx(mx: MXArray, order: jax.Array, slots: jax.Array, top_k: int) -> MXArray:
    q, sf = ops.permute_mx(mx.packed(), order // top_k)
    return MXArray.from_bytes(q, sf, mx.dtype)


_spread_mx.defvjp(
    lambda mx, order, slots, top_k: (_spread_mx(mx, order, slots, top_k), slots),
    lambda top_k, slots, grad: (
        MXArray.cotangent(sum_slots(grad.carrier, slots.reshape(-1, top_k))),
        None,
        None,
    ),
)


def spread_rows(x: Rows, order: Int[jax.Array, " P"], inverse: Int[jax.Array, " T*top_k"], top_k: int) -> Rows:
    """Replicate each token for its top_k experts: out[i] = x[order[i] // top_k], zeros where order is -1.

    x: (T, D) bf16, fp32 or MXArray. order: (P,), the slot t * top_k + k of each row of the result. inverse:
    (T * top_k,), the row of each slot; both int32, P = T * top_k for those of `sort_by_expert`. Returns
    (P, D) of x's kind. The gradient of a token is the fp32 sum over its replicas, rounded once.

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
    spread: Any = _spread_mx if isinstance(x, MXArray) else _spread
    return spread(*arguments(op, x, order, inverse), top_k)


def gather_rows(x: Rows, row_map: Int[jax.Array, " P"], inverse: Int[jax.Array, " M"]) -> Rows:
    """Return x[row_map], zeros where the map is -1; the gradient goes through `inverse`.

    x: (M, K) bf16, fp32 or MXArray. row_map: (P,), inverse: (M,), the map back; both int32. Returns (P, K)
    of x's kind.

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
    gather: Any = _gather_mx if isinstance(x, MXArray) else _gather
    return gather(*arguments(op, x, row_map, inverse))


# --- un-permute ------------------------------------------------------------------------------------


@jax.custom_vjp
def _ungather_mx(x: MXGradArray, row_map: jax.Array, inverse: jax.Array) -> MXGradArray:
    return MXGradArray.of(ops.permute_rows(x.value, inverse))


def _ungather_mx_fwd(x, row_map, inverse):
    # With symbolic_zeros every leaf is (value, perturbed).
    return _ungather_mx(MXGradArray.of(x.value.value), row_map.value, inverse.value), row_map.value


def _ungather_mx_bwd(row_map, grad: MXGradArray):
    value, mx = grad.parts()
    value = None if value is None else ops.permute_rows(value, row_map)
    mx = None if mx is None else ops.permute_mx(pack(*mx), row_map)
    return MXGradArray.cotangent(value, mx, grad.uses), None, None


_ungather_mx.defvjp(_ungather_mx_fwd, _ungather_mx_bwd, symbolic_zeros=True)
_ungather_mx_jitted = jitted(_ungather_mx)


def unpermute_hp_fwd_mxfp8_bwd(
    input: Float[jax.Array, "P N"] | MXGradArray, maps: RowMap
) -> Float[jax.Array, "R N"] | MXGradArray:
    """Gather expert outputs back into the order in which the rows were received; rows without a token are zeros.

    input: (P, N), an array, or an MXGradArray, whose gradient is gathered as MXFP8 bytes. maps: the RowMap of the
    permute. Returns (R, N) of input's kind. Raises ValueError (shapes) and TypeError (dtypes).

    >>> rows, row_map = permute(jnp.ones((3, 32)), jnp.array([2, 1]), 1, 2)
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
        input = input.once(op)
        return _ungather_mx_jitted(*arguments(op, input, maps.row_map, maps.inverse))
    return gather_rows(input, maps.inverse, maps.row_map)
