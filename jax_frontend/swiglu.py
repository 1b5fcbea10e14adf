"""SwiGLU and its gradient, which is computed from gate and up: nothing else is saved.

gate, up, prob --swiglu--> h          dgate, dup, dprob <--swiglu_bwd-- dh, gate, up, prob
"""

import jax
import jax.numpy as jnp
import numpy as np

from . import ops
from ._call import jitted
from ._checks import check_type
from ._derivatives import arguments


def row_probabilities(prob: jax.Array | None) -> jax.Array:
    """`prob` as the ops take it, shape (0,) for a weight of 1 on every row.

    Callers make the empty array directly at the kernel, inside of a jit: jaxlib 0.11.2 aborts the process when a
    zero-size array crosses the boundary of a separately compiled part of a shard_map, as from a forward to its
    backward.
    """
    return jnp.zeros(0, jnp.float32) if prob is None else prob


@jax.custom_vjp
def _swiglu(gate: jax.Array, up: jax.Array, prob: jax.Array | None) -> jax.Array:
    return ops.swiglu(gate, up, row_probabilities(prob))


def _swiglu_bwd(inputs, dh):
    gate, up, prob = inputs
    dgate, dup, dprob = ops.swiglu_bwd(dh, gate, up, row_probabilities(prob))
    return dgate, dup, None if prob is None else dprob


_swiglu.defvjp(lambda *inputs: (_swiglu(*inputs), inputs), _swiglu_bwd)
_swiglu_jitted = jitted(_swiglu)


def swiglu(gate: jax.Array, up: jax.Array, prob: jax.Array | None = None) -> jax.Array:
    """silu(gate) * up * prob, computed in fp32 and rounded once; differentiable in all three.

    gate, up: (M, F) bf16. prob: (M,) fp32, a weight per row, or None. Returns (M, F) bf16. The result has the same bits
    on every device. Raises ValueError (shapes) and TypeError (dtypes).

    >>> one = jnp.ones((1, 1), jnp.bfloat16)
    >>> float(swiglu(one, one, jnp.full(1, 2.0))[0, 0])  # sigmoid(1) = 0.7311, to 8 bits
    1.4609375

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    for name, x in (("gate", gate), ("up", up), *(() if prob is None else (("prob", prob),))):
        check_type("swiglu", name, x, jax.Array, np.ndarray)
    return _swiglu_jitted(*arguments("swiglu", gate, up, prob))
