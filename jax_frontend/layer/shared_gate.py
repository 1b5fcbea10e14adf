"""The gate of a shared expert: its output (T, D) times the sigmoid of x (T, D) weight (1, D)^T.

    x, weight --product--> logit (T, 1) --sigmoid--> fp32 --times out--> y

Logits, result and gradients are rounded to the dtype of x, once each and explicitly: XLA drops a conversion to bf16 and
back in some programs, and a jit would have other bytes than an eager call and than PyTorch.
"""

import jax
import jax.numpy as jnp

from ..ops.call import rounded
from ..ops.derivatives import arguments


def _product(a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """a @ b in fp32, rounded to the dtype."""
    return rounded(jnp.matmul(a, b, preferred_element_type=jnp.float32, precision="highest"), dtype)


def _like(weight: jax.Array, x: jax.Array) -> jax.Array:
    return rounded(weight.astype(jnp.float32), x.dtype)


def _sigmoid(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(_product(x, _like(weight, x).T, x.dtype).astype(jnp.float32))


@jax.custom_vjp
def _gated(x: jax.Array, weight: jax.Array, out: jax.Array) -> jax.Array:
    return rounded(_sigmoid(x, weight) * out.astype(jnp.float32), x.dtype)


def _gated_bwd(residuals, dy):
    x, weight, out = residuals
    gate, dy = _sigmoid(x, weight), dy.astype(jnp.float32)
    dgate = (dy * out.astype(jnp.float32)).sum(1, keepdims=True)
    dlogit = rounded(dgate * gate * (1 - gate), x.dtype)
    dx, dweight = _product(dlogit, _like(weight, x), x.dtype), _product(dlogit.T, x, x.dtype)
    return dx, dweight.astype(weight.dtype), rounded(gate * dy, out.dtype)


_gated.defvjp(lambda x, weight, out: (_gated(x, weight, out), (x, weight, out)), _gated_bwd)


@jax.custom_vjp
def _both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, x


def _both_bwd(_, grads):
    one, other = grads
    return (rounded(one.astype(jnp.float32) + other.astype(jnp.float32), one.dtype),)


_both.defvjp(lambda x: (_both(x), None), _both_bwd)


def duplicate(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x for two readers, whose gradients are added and rounded here."""
    return _both(*arguments("shared_gate", x))


def apply_gate(x: jax.Array, weight: jax.Array, out: jax.Array) -> jax.Array:
    """out (T, D) bf16 times the gate of x (T, D) and weight (1, D) -> (T, D) of the dtype of x."""
    return _gated(*arguments("shared_gate", x, weight, out))
