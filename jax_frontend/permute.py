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
from ._call import vary_alike
from ._checks import check_counts, check_floats, check_integers
from .combine import sum_slots
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
    num_tokens_per_expert: jax.Array,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = BLOCK,
    *,
    rank_rows: int = 0,
) -> tuple[MXArray, RowMap]:
    """Received rows, rank-major, to padded expert-major rows; forward moves bytes, backward moves floats.

    mx: (R, K). num_tokens_per_expert: (ep_degree * num_local_experts,) int32, rank-major.
    rank_rows: rows each rank's part of mx has (`Exchange.capacity`); 0 if the parts have no slack.
    Returns (MXArray (P, K), RowMap); P holds any split of R rows, padding rows are zeros, and an empty
    expert still gets one aligned group.

    Raises ValueError for counts that do not fit ep_degree, an alignment that is no multiple of 32, TypeError if
    mx is no MXArray or the counts are no integers.
    """
    if not isinstance(mx, MXArray):
        allowed = "allowed: an MXArray; `permute` takes float rows"
        fail(TypeError, "permute_mxfp8_fwd_hp_bwd", "mx", type(mx).__name__, allowed)
    maps = _row_map(mx, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of, rank_rows)
    return _gather_mx(*vary_alike(mx, maps.row_map, maps.inverse)), maps


def permute(
    x: jax.Array,
    num_tokens_per_expert: jax.Array,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = BLOCK,
    *,
    rank_rows: int = 0,
) -> tuple[jax.Array, RowMap]:
    """`permute_mxfp8_fwd_hp_bwd` for bf16 or fp32 rows, both ways."""
    check_floats("permute", "x", x)
    maps = _row_map(x, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of, rank_rows)
    return gather_rows(x, maps.row_map, maps.inverse), maps


def pad_groups(x: Any, group_ends: jax.Array, alignment: int) -> tuple[Any, RowMap]:
    """Rows of groups of any size to groups of multiples of `alignment` rows; the unpermute takes the padding out."""
    move: Any = permute_mxfp8_fwd_hp_bwd if isinstance(x, MXArray) else permute
    return move(x, jnp.diff(group_ends, prepend=0), 1, group_ends.shape[0], alignment)


def _row_map(x, counts, ep_degree, num_local_experts, alignment, rank_rows) -> RowMap:
    check_integers("permute", "num_tokens_per_expert", counts)
    if counts.shape != (ep_degree * num_local_experts,):
        fail(
            ValueError, "permute", "num_tokens_per_expert", f"shape {counts.shape}",
            f"allowed: ({ep_degree * num_local_experts},), ep_degree * num_local_experts",
        )  # fmt: skip
    check_counts("permute", counts, ep_degree if rank_rows else 1, rank_rows or x.shape[0])
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
    """
    spread: Any = _spread_mx if isinstance(x, MXArray) else _spread
    return spread(*vary_alike(x, order, inverse), copies)


def gather_rows(x: jax.Array, row_map: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[row_map], zeros where the map is -1; the gradient goes through `inverse`, the map back.

    x: (R, D) bf16 or fp32; row_map: (P,) int32; inverse: (R,) int32.
    """
    return _gather(*vary_alike(x, row_map, inverse))


# --- un-permute ------------------------------------------------------------------------------------


@jax.custom_vjp
def _ungather_mx(x: MXGradArray, row_map: jax.Array, inverse: jax.Array) -> MXGradArray:
    return MXGradArray.wrap(ops.permute_rows(x.value, inverse))


def _ungather_mx_fwd(x, row_map, inverse):
    # symbolic_zeros hands every leaf over as (value, perturbed).
    return _ungather_mx(MXGradArray.wrap(x.value.value), row_map.value, inverse.value), row_map.value


def _ungather_mx_bwd(row_map, grad: MXGradArray):
    value, mx = grad.parts()
    value = None if value is None else ops.permute_rows(value, row_map)
    mx = None if mx is None else ops.permute_mx(pack(*mx), row_map)
    return MXGradArray.cotangent(value, mx, grad.uses), None, None


_ungather_mx.defvjp(_ungather_mx_fwd, _ungather_mx_bwd, symbolic_zeros=True)
# Outside a jit, shard_map takes no custom_vjp with symbolic zeros.
_ungather_mx_jitted = jax.jit(_ungather_mx, inline=True)


def unpermute_hp_fwd_mxfp8_bwd(input: jax.Array | MXGradArray, maps: RowMap) -> jax.Array | MXGradArray:
    """Padded expert-major rows back to received order, without the padding; rows without a token are zeros.

    input: (P, N), an MXGradArray from `mxfp8_grouped_mm(..., mx_grad=True)`, whose gradient is gathered as
    MXFP8 bytes, or an array, whose gradient is gathered as it is. maps: what the permute returned.
    Returns (R, N), of the kind that came in. Raises ValueError unless the rows are those of the map.
    """
    op = "unpermute_hp_fwd_mxfp8_bwd"
    if not isinstance(input, MXGradArray):
        check_floats(op, "input", input, " or an MXGradArray")
    if len(input.shape) != 2 or input.shape[0] != maps.row_map.shape[0]:
        allowed = f"allowed: ({maps.row_map.shape[0]}, N), the rows of maps.row_map"
        fail(ValueError, op, "input", f"shape {input.shape}", allowed)
    if isinstance(input, MXGradArray):
        input = input.once(op)
        return _ungather_mx_jitted(*vary_alike(input, maps.row_map, maps.inverse))
    return gather_rows(input, maps.inverse, maps.row_map)
