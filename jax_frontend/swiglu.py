"""SwiGLU with a weight per row, differentiable: the gate's sigmoid is recomputed, nothing but the inputs is saved.

gate, up (M, F), prob (M,) --swiglu--> h (M, F)
dgate, dup, dprob <--swiglu_bwd-- dh, gate, up, prob
"""

import jax
import jax.numpy as jnp
import numpy as np

from . import ops
from ._call import jitted
from ._checks import check_type
from ._derivatives import arguments


def weights(prob: jax.Array | None) -> jax.Array:
    """A weight per row as the kernels take it: of shape (0,) where every row weighs one.

    Made where a kernel is called, inside of a jit: jaxlib 0.11.2 ends the process when such an array crosses into or
    out of a part of a shard_map that it compiles by itself, as from a forward to its backward.
    """
    return jnp.zeros(0, jnp.float32) if prob is None else prob


@jax.custom_vjp
def _swiglu(gate: jax.Array, up: jax.Array, prob: jax.Array | None) -> jax.Array:
    return ops.swiglu(gate, up, weights(prob))


def _swiglu_bwd(inputs, dh):
    gate, up, prob = inputs
    dgate, dup, dprob = ops.swiglu_bwd(dh, gate, up, weights(prob))
    return dgate, dup, None if prob is None else dprob


_swiglu.defvjp(lambda *inputs: (_swiglu(*inputs), inputs), _swiglu_bwd)
_swiglu_jitted = jitted(_swiglu)


def swiglu(gate: jax.Array, up: jax.Array, prob: jax.Array | None = None) -> jax.Array:
    """silu(gate) * up * prob, computed in fp32 and rounded once.

    gate, up: (M, F) bf16. prob: (M,) fp32, a weight per row. Returns (M, F) bf16; gradients have their
    argument's dtype.

    >>> one = jnp.ones((1, 1), jnp.bfloat16)
    >>> float(swiglu(one, one, jnp.full(1, 2.0))[0, 0])  # sigmoid(1) = 0.7311, to 8 bits
    1.4609375

    Raises ValueError (shape) or TypeError (dtype). Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    for name, x in (("gate", gate), ("up", up), *(() if prob is None else (("prob", prob),))):
        check_type("swiglu", name, x, jax.Array, np.ndarray)
    return _swiglu_jitted(*arguments("swiglu", gate, up, prob))
