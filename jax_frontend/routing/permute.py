"""Replicas of tokens in the order of their experts. Every step is one gather or one sum, forward and backward.

sort_by_expert   experts (T, K) --> order, inverse (T K,), counts (E,)
spread           x (T, D) --order // top_k--> rows (P, D)       backward: fp32 sum over K, rounded once
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ...core_kernels.launch import fail
from .. import ops
from ..ops import ExpertOrder
from ..ops.checks import check_experts, check_integers, check_size, clip_experts, reads_values
from ..ops.derivatives import arguments
from ..ops.mx_array import MXArray
from ..ops.shapes import Int
from ..products.gathers import HERE, Reader, Rows
from .weighted_combine import sum_slots


def sort_by_expert(expert_ids: Int[jax.Array, "T top_k"] | Int[jax.Array, " S"], num_experts: int) -> ExpertOrder:
    """Sort the slots of a routing by expert, stably.

    Args:
        expert_ids: (T, top_k) or (S,) of an integer dtype, values in [0, num_experts): the expert of slot t * top_k +
            k. Inside jit others are clipped.
        num_experts: E, at least 1.

    Returns:
        An `ExpertOrder`: order (S,), the slot of each row; inverse (S,), the row of each slot; counts (num_experts,).

    Raises:
        TypeError: dtype.
        ValueError: shape; values in eager calls on a CPU and under checkify.

    Example:
        >>> sort_by_expert(jnp.array([[1, 0], [1, 2]]), num_experts=3).order.tolist()
        [1, 0, 2, 3]
    """
    op = "sort_by_expert"
    check_integers(op, "expert_ids", expert_ids)
    if expert_ids.ndim not in (1, 2):
        fail(ValueError, op, "expert_ids", f"shape {expert_ids.shape}", "allowed: (T, top_k) or (S,)")
    check_size(op, "num_experts", num_experts, 1)
    expert_ids = jnp.asarray(expert_ids)
    if isinstance(expert_ids, Tracer) or reads_values(expert_ids):
        check_experts(op, "expert_ids", expert_ids, num_experts)
    return ops.sort_by_expert(clip_experts(expert_ids.reshape(-1), num_experts), num_experts)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _spread(x: jax.Array, order: jax.Array, slots: jax.Array, top_k: int, reader: Reader) -> jax.Array:
    return reader.permute_rows(x, order // top_k)


_spread.defvjp(
    lambda x, order, slots, top_k, reader: (_spread(x, order, slots, top_k, reader), slots),
    lambda top_k, reader, slots, grad: (sum_slots(grad, slots.reshape(-1, top_k), reader), None, None),
)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _spread_mx(mx: MXArray, order: jax.Array, slots: jax.Array, top_k: int, reader: Reader) -> MXArray:
    return reader.gather_mx(mx, order // top_k)


_spread_mx.defvjp(
    lambda mx, order, slots, top_k, reader: (_spread_mx(mx, order, slots, top_k, reader), slots),
    lambda top_k, reader, slots, grad: (
        MXArray.cotangent(sum_slots(grad.carrier, slots.reshape(-1, top_k), reader)),
        None,
        None,
    ),
)


def spread(op: str, x: Rows, order: jax.Array, slots: jax.Array, top_k: int, reader: Reader = HERE) -> Rows:
    """`rows.spread_rows` for checked arguments."""
    run: Any = _spread_mx if isinstance(x, MXArray) else _spread
    return run(*arguments(op, x, order, slots), top_k, reader)
