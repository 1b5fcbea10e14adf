"""Sums over the rows of groups: gradients of the biases of products, as products."""

import jax
import jax.numpy as jnp
from jax import lax

from .. import ops
from .forms.form import MX, as_bf16


def bias_gradient(dout: jax.Array | MX, group_ends: jax.Array, row_weights: jax.Array | None = None) -> jax.Array:
    """dout (M, N) -> (G, N) fp32, the sum of each group's rows, computed as the product of dout^T and ones or
    row_weights (M,) fp32.

    An fp32 dout is the sum of two bf16 numbers, which leaves out 2^-17 of each value.
    """
    high = as_bf16(dout)
    parts = [high]
    if isinstance(dout, jax.Array) and dout.dtype == jnp.float32:
        # XLA may remove a conversion to bf16 and back, but not reduce_precision.
        kept = lax.reduce_precision(dout, 8, 7)
        parts.append(as_bf16(jnp.where(jnp.isfinite(kept), dout - kept, 0)))
    if row_weights is None:
        ones = jnp.ones_like(high[:, :8])
        sums = [ops.grouped_wgrad_bf16(part, ones, group_ends, out_dtype="float32")[..., 0] for part in parts]
        return jnp.stack(sums).sum(0)
    columns = _in_thirds(row_weights).T
    sums = [ops.grouped_wgrad_bf16(part, columns, group_ends, out_dtype="float32") for part in parts]
    return jnp.stack(sums).sum((0, -1))


def bias_row_products(dout: jax.Array | MX, bias: jax.Array, group_ends: jax.Array) -> jax.Array:
    """dout (M, N), bias (G, N) fp32 -> (M,) fp32, the product of each row and the bias of its group; zeros past the
    last end."""
    thirds = _in_thirds(bias.reshape(-1)).reshape(8, *bias.shape).swapaxes(0, 1)
    return ops.grouped_mm_bf16(as_bf16(dout), thirds, group_ends, out_dtype="float32").sum(-1)


def _in_thirds(x: jax.Array) -> jax.Array:
    """fp32 (n,) -> (8, n) bf16, three rows of 8 bits each, whose sum is x, and zeros: the kernels take 8."""
    high = lax.reduce_precision(x, 8, 7)  # XLA may remove a conversion to bf16 and back
    rest = jnp.where(jnp.isfinite(high), x - high, 0)
    middle = lax.reduce_precision(rest, 8, 7)
    return jnp.stack([high, middle, rest - middle, *[jnp.zeros_like(x)] * 5]).astype(jnp.bfloat16)
