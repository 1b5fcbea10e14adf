"""Permute and un-permute with their gradients: rows to padded expert-major groups and back.

    forward    MXArray --permute--> MXArray  --> experts -->  MXGradArray --unpermute--> MXGradArray
                (R, K)               (P, K)                     (P, N)                     (R, N)
    backward    bf16  <--gather----  bf16   <-- experts <--   MXFP8      <--gather-----  MXFP8

Everything to the left of the experts goes forward in MXFP8 and backward in bf16, everything to the right the
other way round, so what crosses the network in MXFP8 meets the grouped products (vjp.py, ffn.py) without being
dequantized and quantized again. Semantics of the public names: torchao's MXFP8 expert-parallel functions.
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
from .combine import sum_slots
from .ep import Exchange
from .mx_array import MXArray, MXGradArray, pack
from .ops import RowMap

Rows = TypeVar("Rows", jax.Array, MXArray)

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
    num_tokens_per_expert: jax.Array | Exchange,
    ep_degree: int | None = None,
    num_local_experts: int | None = None,
    group_size_multiple_of: int = BLOCK,
    *,
    rank_rows: int | None = None,
) -> tuple[MXArray, RowMap]:
    """Received rows, rank-major, to padded expert-major rows; forward moves bytes, backward moves floats.

    mx: (R, K). num_tokens_per_expert: the Exchange that dispatched them, which says the rest:
        `permute_mxfp8_fwd_hp_bwd(received, exchange)`. Of rows that came otherwise: (ep_degree * num_local_experts,)
        int32, the counts received, rank-major; and
    rank_rows: rows that each rank's part of mx has, 0 if the parts have no slack, as one rank's has none.
    group_size_multiple_of: rows each group is padded to, a multiple of 32.
    Returns (MXArray (P, K), RowMap); P holds any split of R rows, padding rows are zeros, and an empty
    expert still gets one aligned group.

    Raises ValueError for rows that are not the exchange's, counts that do not fit ep_degree, several ranks without
    rank_rows, an alignment that is no multiple of 32; TypeError if mx is no MXArray or the counts are no integers.
    """
    op = "permute_mxfp8_fwd_hp_bwd"
    if not isinstance(mx, MXArray):
        fail(TypeError, op, "mx", type(mx).__name__, "allowed: an MXArray; `permute` takes float rows")
    maps = _row_map(op, mx, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of, rank_rows)
    return _gather_mx(*arguments(op, mx, maps.row_map, maps.inverse)), maps


def permute(
    x: jax.Array,
    num_tokens_per_expert: jax.Array | Exchange,
    ep_degree: int | None = None,
    num_local_experts: int | None = None,
    group_size_multiple_of: int = BLOCK,
    *,
    rank_rows: int | None = None,
) -> tuple[jax.Array, RowMap]:
    """`permute_mxfp8_fwd_hp_bwd` for bf16 or fp32 rows, both ways."""
    op = "permute"
    check_floats(op, "x", x)
    maps = _row_map(op, x, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of, rank_rows)
    return gather_rows(x, maps.row_map, maps.inverse), maps


def pad_groups(x: Any, group_ends: jax.Array, alignment: int) -> tuple[Any, RowMap]:
    """Rows of groups of any size to groups of multiples of `alignment` rows; the unpermute takes the padding out."""
    move: Any = permute_mxfp8_fwd_hp_bwd if isinstance(x, MXArray) else permute
    return move(x, jnp.diff(group_ends, prepend=0), 1, group_ends.shape[0], alignment)


def _row_map(op, x, counts, ep_degree, num_local_experts, alignment, rank_rows) -> RowMap:
    argument = "mx" if isinstance(x, MXArray) else "x"
    check_matrix(op, argument, x)
    if isinstance(counts, Exchange):
        if (ep_degree, num_local_experts, rank_rows) != (None, None, None):
            got = "an Exchange beside ep_degree, num_local_experts or rank_rows"
            fail(ValueError, op, "num_tokens_per_expert", got, "allowed: the Exchange alone, which says them")
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
def _spread(x: jax.Array, order: jax.Array, slots: jax.Array, copies: int) -> jax.Array:
    return ops.permute_rows(x, order // copies)


_spread.defvjp(
    lambda x, order, slots, copies: (_spread(x, order, slots, copies), slots),
    lambda copies, slots, grad: (sum_slots(grad, slots.reshape(-1, copies)), None, None),
)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread_mx(mx: MXArray, order: jax.Array, slots: jax.Array, copies: int) -> MXArray:
    q, sf = ops.permute_mx(mx.packed(), order // copies)
    return MXArray.from_bytes(q, sf, mx.dtype)


_spread_mx.defvjp(
    lambda mx, order, slots, copies: (_spread_mx(mx, order, slots, copies), slots),
    lambda copies, slots, grad: (
        MXArray.cotangent(sum_slots(grad.carrier, slots.reshape(-1, copies))),
        None,
        None,
    ),
)


def spread_rows(x: Rows, order: jax.Array, inverse: jax.Array, copies: int) -> Rows:
    """Copy each token to its `copies` slots: out[i] = x[order[i] // copies], zeros where order is -1.

    x: (T, D) bf16 or fp32, or an MXArray, whose bytes are copied; order: (P,) int32, the slot t * copies + c that
    each row of the result fills; inverse: (T * copies,) int32, the way back. For `order` and `inverse` of
    `sort_by_expert` P is T * copies. The gradient of a token is the fp32 sum over its slots, rounded once.

    Raises ValueError for shapes that do not fit each other, TypeError for other dtypes.
    """
    op = "spread_rows"
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    check_size(op, "copies", copies, 1)
    check_matrix(op, "x", x)
    check_vector(op, "order", order)
    check_shape(op, "inverse", inverse, (x.shape[0] * copies,), "x's rows, `copies` times", "int")
    spread: Any = _spread_mx if isinstance(x, MXArray) else _spread
    return spread(*arguments(op, x, order, inverse), copies)


def gather_rows(x: jax.Array, row_map: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[row_map], zeros where the map is -1; the gradient goes through `inverse`, the map back.

    x: (R, D) bf16 or fp32; row_map: (P,) int32; inverse: (R,) int32.

    Raises ValueError for shapes that do not fit each other, TypeError for other dtypes.
    """
    op = "gather_rows"
    check_floats(op, "x", x)
    check_matrix(op, "x", x)
    check_vector(op, "row_map", row_map)
    check_shape(op, "inverse", inverse, x.shape[:1], "the rows of x", "int")
    return _gather(*arguments(op, x, row_map, inverse))


# --- un-permute ------------------------------------------------------------------------------------


@jax.custom_vjp
def _ungather_mx(x: MXGradArray, row_map: jax.Array, inverse: jax.Array) -> MXGradArray:
    return MXGradArray.of(ops.permute_rows(x.value, inverse))


def _ungather_mx_fwd(x, row_map, inverse):
    # symbolic_zeros hands every leaf over as (value, perturbed).
    return _ungather_mx(MXGradArray.of(x.value.value), row_map.value, inverse.value), row_map.value


def _ungather_mx_bwd(row_map, grad: MXGradArray):
    value, mx = grad.parts()
    value = None if value is None else ops.permute_rows(value, row_map)
    mx = None if mx is None else ops.permute_mx(pack(*mx), row_map)
    return MXGradArray.cotangent(value, mx, grad.uses), None, None


_ungather_mx.defvjp(_ungather_mx_fwd, _ungather_mx_bwd, symbolic_zeros=True)
_ungather_mx_jitted = jitted(_ungather_mx)


def unpermute_hp_fwd_mxfp8_bwd(input: jax.Array | MXGradArray, maps: RowMap) -> jax.Array | MXGradArray:
    """Padded expert-major rows back to received order, without the padding; rows without a token are zeros.

    input: (P, N), an MXGradArray from `mxfp8_grouped_mm(..., mx_grad=True)`, whose gradient is gathered as
    MXFP8 bytes, or an array, whose gradient is gathered as it is. maps: what the permute returned.
    Returns (R, N), of the kind that came in. Raises ValueError unless the rows are those of the map.
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
