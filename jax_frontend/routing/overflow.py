"""Rows above the capacity of a static buffer, and their effect on their tokens.

    forward    y[t]  NaN for a token with a lost row         the other tokens as they are
    backward   dy    as it is                                dx[t], dprobs[t, k]  NaN for a lost row

A NaN, unlike a zero, is in the loss and in the norm of the gradients of the step that lost a row. The gradients of the
experts' weights sum over the rows within the capacity: dy of a lost token is the loss's gradient at its NaN.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.export import is_symbolic_dim

from ...core_kernels.launch import fail
from ..ops.derivatives import arguments


def check_capacity_factor(op: str, capacity_factor: Any) -> None:
    """Raise TypeError unless it is a number or None, ValueError unless it is positive and finite."""
    allowed = "allowed: a number above 0, or None for dropless"
    if capacity_factor is None:
        return
    if isinstance(capacity_factor, bool) or not isinstance(capacity_factor, int | float):
        fail(TypeError, op, "capacity_factor", shown(capacity_factor), allowed)
    if not 0 < capacity_factor < math.inf:
        fail(ValueError, op, "capacity_factor", capacity_factor, allowed)


def shown(value: Any) -> str:
    """The value in an error."""
    return "a traced value, which differs from call to call" if isinstance(value, Tracer) else repr(value)


def capacity_of(op: str, capacity_factor: float | None, num_rows: int, parts: int, most: int) -> int:
    """Rows of a buffer: capacity_factor times num_rows / parts, their mean, and at most `most`."""
    if capacity_factor is None:
        return most
    if is_symbolic_dim(num_rows):
        fail(NotImplementedError, op, "capacity_factor", capacity_factor, f"allowed: None with {num_rows} rows")
    return min(most, math.ceil(capacity_factor * num_rows / parts))


def lost_rows(positions: jax.Array, counts: jax.Array) -> jax.Array:
    """(M,) bool: the rows that counts (E,) give to an expert, and whose entry in positions (M,) is negative."""
    return (positions < 0) & (jnp.arange(positions.shape[0], dtype=jnp.int32) < counts.astype(jnp.int32).sum())


def _of_rows(lost: jax.Array) -> jax.Array:
    """(R, 1) of lost (R,), or of any of lost (R, k)."""
    return (lost[:, None] if lost.ndim == 1 else lost).any(1, keepdims=True)


def _over(x: jax.Array, lost: jax.Array) -> jax.Array:
    return jnp.where(lost, jnp.nan, x)


@jax.custom_vjp
def _nan_values(x: jax.Array, lost: jax.Array) -> jax.Array:
    return _over(x, lost)


@jax.custom_vjp
def _nan_gradients(x: jax.Array, lost: jax.Array) -> jax.Array:
    return x


_nan_values.defvjp(lambda x, lost: (_over(x, lost), None), lambda _, grad: (grad, None))
_nan_gradients.defvjp(lambda x, lost: (x, lost), lambda lost, grad: (_over(grad, lost), None))


def nan_values(op: str, x: jax.Array, lost: jax.Array | None) -> jax.Array:
    """x (R, N) with NaN in lost rows, (R,) or any of (R, k); the gradient passes unchanged. None: no row is lost."""
    return x if lost is None else _nan_values(*arguments(op, x, _of_rows(lost)))


def nan_gradients(op: str, x: jax.Array, lost: jax.Array | None) -> jax.Array:
    """x (R, N), whose gradient is NaN in lost rows, (R,) or any of (R, k). None: no row is lost."""
    return x if lost is None else _nan_gradients(*arguments(op, x, _of_rows(lost)))


def nan_gradients_of_probs(op: str, probs: jax.Array, lost: jax.Array | None) -> jax.Array:
    """probs, whose gradient is NaN where lost, of the same shape. None: no row is lost."""
    return probs if lost is None else _nan_gradients(*arguments(op, probs, lost))
