"""Checks of what the kernels' own plans do not see: types that lack a gradient, and values.

A traced program knows values only when it runs:

called eagerly                           ValueError
inside `checkify.checkify(jax.jit(f))`   an error that the caller takes out: `error.throw()`
inside jax.jit alone                     nothing: XLA removes the check
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail, require_multiple

FLOATS = ("bfloat16", "float32")


def check_floats(op: str, argument: str, x: object, other: str = "") -> None:
    """TypeError unless x is an array of bf16 or fp32; `other` names what else the argument may be."""
    is_array = isinstance(x, jax.Array | np.ndarray)
    if not is_array or np.dtype(x.dtype).name not in FLOATS:
        got = f"dtype {x.dtype}" if is_array else type(x).__name__
        fail(TypeError, op, argument, got, f"allowed: a bfloat16 or float32 array{other}")


def check_integers(op: str, argument: str, x: object) -> None:
    """TypeError unless x is an array of integers."""
    is_array = isinstance(x, jax.Array | np.ndarray)
    if not is_array or not jnp.issubdtype(x.dtype, jnp.integer):
        fail(TypeError, op, argument, f"dtype {x.dtype}" if is_array else type(x).__name__, "allowed: an int32 array")


def check_values(ok: jax.Array, op: str, argument: str, got: jax.Array, allowed: str) -> None:
    """Raise ValueError, or report to checkify, unless the scalar `ok` holds."""
    if isinstance(ok, Tracer):
        checkify.debug_check(ok, f"{op}: {argument}: got {{got}}; {allowed}", got=got)
    elif not ok:
        fail(ValueError, op, argument, got, allowed)


def check_blocks(op: str, argument: str, rows: int, group_ends: jax.Array, whole: bool) -> None:
    """Group ends fit the rows; with `whole` both are multiples of 32, as a weight gradient along the tokens needs."""
    remedy = "the weight gradient quantizes along them; use pad_token_groups=True"
    if whole:
        require_multiple(op, argument, rows, BLOCK, "rows", remedy)
    check_ends(op, group_ends, rows, BLOCK if whole else 1)


def check_ends(op: str, group_ends: jax.Array, rows: int, multiple: int) -> None:
    """Group ends neither decrease nor pass the rows, and are multiples of `multiple`."""
    steps = jnp.diff(group_ends, prepend=0, append=rows)
    ok = (steps >= 0).all() & (group_ends % multiple == 0).all()
    what = "multiples of 32 that do not decrease" if multiple > 1 else "ends that do not decrease"
    check_values(ok, op, "group_ends", group_ends, f"allowed: {what}, at most {rows}, the rows they divide")


def check_counts(op: str, counts: jax.Array, parts: int, rows: int, argument: str = "num_tokens_per_expert") -> None:
    """Counts are not negative, and each of the `parts` parts of them fits into `rows` rows."""
    ok = (counts >= 0).all() & (counts.reshape(parts, -1).sum(1) <= rows).all()
    allowed = f"allowed: counts of at least 0 that sum to at most {rows}, the rows they count"
    check_values(ok, op, argument, counts, allowed)
