"""SwiGLU with a weight per row, differentiable: the gate's sigmoid is recomputed, nothing but the inputs is saved.

gate, up (M, F), prob (M,) --swiglu--> h (M, F)
dgate, dup, dprob <--swiglu_bwd-- dh, gate, up, prob
"""

import jax
import jax.numpy as jnp

from . import ops
from ._call import vary_alike

_swiglu = jax.custom_vjp(ops.swiglu)
_swiglu.defvjp(lambda *inputs: (ops.swiglu(*inputs), inputs), lambda inputs, dh: ops.swiglu_bwd(dh, *inputs))


def weights(prob: jax.Array | None) -> jax.Array:
    """A weight per row as the kernels take it: of shape (0,) where every row weighs one."""
    return jnp.zeros(0, jnp.float32) if prob is None else prob


def swiglu(gate: jax.Array, up: jax.Array, prob: jax.Array | None = None) -> jax.Array:
    """silu(gate) * up * prob, computed in fp32 and rounded once.

    gate, up: (M, F) bf16. prob: (M,) fp32, a weight per row. Returns (M, F) bf16; gradients have their
    argument's dtype.

    >>> one = jnp.ones((1, 1), jnp.bfloat16)
    >>> float(swiglu(one, one, jnp.full(1, 2.0))[0, 0])  # sigmoid(1) = 0.7311, to 8 bits
    1.4609375

    Raises ValueError (shape) or TypeError (dtype). Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return _swiglu(*vary_alike(gate, up, weights(prob)))
