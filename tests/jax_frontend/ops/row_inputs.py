"""The inputs of the ops that each device runs on its own rows."""

import jax
from mxep.jax_frontend import ops
from mxep.jax_frontend.ops.split import WHOLE_DIMS


def inputs_of(
    name: str, x: jax.Array, up: jax.Array, dh: jax.Array, prob: jax.Array, w: jax.Array
) -> tuple[jax.Array, ...]:
    """x, up, dh (M, K), prob (M,), w (G, N, K)."""
    if WHOLE_DIMS[name] == 2:
        return (w,)
    if name in ("dequantize", "fold_rows"):
        return tuple(ops.quantize_row(x))
    if not name.startswith("swiglu"):
        return (x,)
    return (dh, x, up, prob) if "bwd" in name else (x, up, prob)
