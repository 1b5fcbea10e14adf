"""SwiGLU and its gradient, which is computed from gate and up: nothing else is saved.

gate, up, prob --swiglu--> h          dgate, dup, dprob <--swiglu_bwd-- dh, gate, up, prob

A form quantizes h in the same pass: `Format.hidden`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ...core_kernels.swiglu.activation import PLAIN, SwiGLU
from .. import ops
from ..ops.call import jitted
from ..ops.checks import check_matrix, check_shape, check_type
from ..ops.derivatives import arguments_by_rows
from ..ops.shapes import BFloat16, Float32


def row_probabilities(prob: jax.Array | None) -> jax.Array:
    """`prob` as the ops take it, shape (0,) for a weight of 1 on every row."""
    return jnp.zeros(0, jnp.float32) if prob is None else prob


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _swiglu(gate: jax.Array, up: jax.Array, prob: jax.Array | None, activation: SwiGLU) -> jax.Array:
    return ops.swiglu(gate, up, row_probabilities(prob), None, *activation.attributes)


def _swiglu_fwd(gate, up, prob, activation):
    return _swiglu(gate, up, prob, activation), (gate, up, prob)


def _swiglu_bwd(activation, inputs, dh):
    gate, up, prob = inputs
    dgate, dup, dprob = ops.swiglu_bwd(dh, gate, up, row_probabilities(prob), None, *activation.attributes)
    return dgate, dup, None if prob is None else dprob


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)
_swiglu_jitted = jitted(_swiglu, 3)


def swiglu(
    gate: BFloat16[jax.Array, "M F"],
    up: BFloat16[jax.Array, "M F"],
    prob: Float32[jax.Array, " M"] | None = None,
    activation: SwiGLU = PLAIN,
) -> BFloat16[jax.Array, "M F"]:
    """silu(gate) * up * prob, computed in fp32 and rounded once; differentiable in all three.

    Args:
        gate: (M, F) bf16.
        up: (M, F) bf16.
        prob: (M,) fp32, a weight per row, or None.
        activation: a `SwiGLU`, which limits gate and up and changes the formula.

    Returns:
        (M, F) bf16. The result has the same bits on every device.

    Raises:
        ValueError: shapes.
        TypeError: dtypes.

    Example:
        >>> one = jnp.ones((1, 1), jnp.bfloat16)
        >>> float(swiglu(one, one, jnp.full(1, 2.0))[0, 0])  # sigmoid(1) = 0.7311, to 8 bits
        1.4609375
        >>> float(swiglu(one, one, activation=SwiGLU(limit=0.5, offset=1.0))[0, 0])  # 1.5 * 0.5 * sigmoid(0.5)
        0.466796875

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    for name, x in (("gate", gate), ("up", up)):
        check_type("swiglu", name, x, jax.Array, np.ndarray)
    check_matrix("swiglu", "gate", gate)
    if prob is not None:
        check_shape("swiglu", "prob", prob, gate.shape[:1], "a weight per row of gate", "float32")
    return _swiglu_jitted(*arguments_by_rows("swiglu", gate, up, prob), SwiGLU.check("swiglu", activation))
