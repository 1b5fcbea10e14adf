"""Argument checks of the differentiable functions: types, and the values that a kernel's plan cannot see.

A traced program has values only when it runs. A wrong value is then

    in an eager call                         a ValueError
    inside `checkify.checkify(jax.jit(f))`   an error that the caller raises: `error.throw()`
    inside jax.jit alone                     ignored: XLA removes the check
"""

import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim

from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail, require_multiple
from .private import check_later, describe

FLOATS = ("bfloat16", "float32")


def check_floats(op: str, argument: str, x: object, other: str = "") -> None:
    """TypeError unless x is an array of bf16 or fp32. `other` names the other allowed types."""
    is_array = isinstance(x, jax.Array | np.ndarray)
    if not is_array or np.dtype(x.dtype).name not in FLOATS:
        got = f"dtype {x.dtype}" if is_array else type(x).__name__
        fail(TypeError, op, argument, got, f"allowed: a bfloat16 or float32 array{other}")


def check_bias(op: str, argument: str, bias: Any, groups: int, n: int) -> jax.Array:
    """bias (N,) or (G, N) as (G, N) fp32; TypeError unless it is bf16 or fp32, ValueError for another shape."""
    check_floats(op, argument, bias)
    if bias.shape not in ((n,), (groups, n)):
        fail(ValueError, op, argument, f"shape {bias.shape}", f"allowed: ({n},) or ({groups}, {n})")
    # The cast comes before the broadcast, so that the gradient is rounded after all sums.
    return jnp.broadcast_to(jnp.asarray(bias).astype(jnp.float32), (groups, n))


def check_type(op: str, argument: str, x: object, *kinds: type) -> None:
    """TypeError unless x is of one of the kinds."""
    if not isinstance(x, kinds):
        fail(TypeError, op, argument, type(x).__name__, f"allowed: {' or '.join(kind.__name__ for kind in kinds)}")


def check_size(op: str, argument: str, x: Any, least: int = 0) -> None:
    """TypeError unless x is an int, ValueError unless it is in [least, 2^31); a symbol of jax.export passes."""
    if is_symbolic_dim(x):
        return
    if isinstance(x, bool) or not hasattr(x, "__index__") or isinstance(x, jax.Array | np.ndarray):
        fail(TypeError, op, argument, repr(x), "allowed: an int")
    if not least <= int(x) < 2**31:
        fail(ValueError, op, argument, x, f"allowed: {least} to {2**31 - 1}")


def check_integers(op: str, argument: str, x: object, other: str = "") -> None:
    """TypeError unless x is an array of integers."""
    is_array = isinstance(x, jax.Array | np.ndarray)
    if not is_array or not jnp.issubdtype(x.dtype, jnp.integer):
        got = f"dtype {x.dtype}" if is_array else type(x).__name__
        fail(TypeError, op, argument, got, f"allowed: an int32 array{other}")


def check_shape(op: str, argument: str, x: object, shape: tuple[int, ...], why: str, dtype: str) -> None:
    """TypeError unless x is an array of this dtype ("int": any integer dtype), ValueError unless it has this shape."""
    if dtype == "int":
        check_integers(op, argument, x)
    elif not isinstance(x, jax.Array | np.ndarray) or np.dtype(x.dtype).name != dtype:
        got = f"dtype {x.dtype}" if isinstance(x, jax.Array | np.ndarray) else type(x).__name__
        fail(TypeError, op, argument, got, f"allowed: {dtype}")
    assert isinstance(x, jax.Array | np.ndarray)
    if x.shape != shape:
        fail(ValueError, op, argument, f"shape {x.shape}", f"allowed: {shape}, {why}")


def check_matrix(op: str, argument: str, x: Any) -> None:
    """ValueError unless x, an array or an MXArray, has two dims."""
    if len(x.shape) != 2:
        fail(ValueError, op, argument, f"shape {x.shape}", "allowed: 2 dims")


def check_vector(op: str, argument: str, x: Any) -> None:
    """TypeError unless x is an array of integers, ValueError unless it has one dim."""
    check_integers(op, argument, x)
    if x.ndim != 1:
        fail(ValueError, op, argument, f"shape {x.shape}", "allowed: 1 dim")


def check_bytes(op: str, argument: str, x: Any) -> None:
    """TypeError unless x is an array of uint8, ValueError unless it has two dims."""
    if not isinstance(x, jax.Array | np.ndarray) or x.dtype != np.uint8:
        fail(TypeError, op, argument, getattr(x, "dtype", type(x).__name__), "allowed: a uint8 array")
    check_matrix(op, argument, x)


def dtype_name(op: str, argument: str, dtype: Any, allowed: tuple[str, ...] = FLOATS) -> str:
    """The name of a dtype or dtype-like value; TypeError unless it is allowed."""
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = None
    if name not in allowed:
        fail(TypeError, op, argument, name or repr(dtype), f"allowed: {' or '.join(allowed)}")
    return name


def rounding_of(op: str, argument: str, rounding: Any) -> Rounding:
    """`Rounding.parse` with errors that name the op."""
    try:
        return Rounding.parse(rounding)
    except (TypeError, ValueError) as error:
        names = ", ".join(repr(member.name.lower()) for member in Rounding)
        fail(type(error), op, argument, repr(rounding), f"allowed: a Rounding, or its name: {names}")


def warn_caller(text: str) -> None:
    """A UserWarning at the line outside of this package and of JAX that called."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("mxep", "jax"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def reads_values(x: Any) -> bool:
    """Whether reading the values of x waits for no GPU: it is numpy's, or has them on a CPU of this process."""
    if isinstance(x, Tracer):
        return False
    if not isinstance(x, jax.Array):
        return True
    return x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())


def check_values(ok: jax.Array, op: str, argument: str, got: jax.Array, allowed: str) -> None:
    """Raise ValueError, or report to checkify, unless all of `ok` holds. For a scalar `ok` the message has all of got;
    for one `ok` per value it has the first wrong value and its index, as errors of kernels do."""
    if isinstance(ok, Tracer):
        check_later(ok, f"{op}: {argument}: got {{got}}; {allowed}", got)
    elif not ok.all():
        text, fields = describe(ok, got)
        fail(ValueError, op, argument, text.format(**fields), allowed)


def check_experts(op: str, argument: str, ids: jax.Array, num_experts: int) -> None:
    """Check that each expert exists."""
    ok = (ids >= 0) & (ids <= _last(ids, num_experts))
    check_values(ok, op, argument, ids, f"allowed: 0 to {num_experts - 1}")


def clip_experts(ids: jax.Array, num_experts: int) -> jax.Array:
    """ids in int32, clipped to experts that exist: inside jit no check stops wrong ones. A kernel that raised on one
    device of a mesh would end the process, since the others wait for that device."""
    return jnp.clip(ids, 0, _last(ids, num_experts)).astype(jnp.int32)


def clip_counts(counts: jax.Array, num_rows: int) -> jax.Array:
    """counts (E,) in int32, clipped to the rows that are left, for the reason of `clip_experts`."""
    ends = jnp.minimum(jnp.cumsum(jnp.clip(counts.astype(jnp.int32), 0, num_rows)), num_rows)
    return jnp.diff(ends, prepend=0)


def _last(ids: jax.Array, num_experts: Any) -> Any:
    if is_symbolic_dim(num_experts):  # of jax.export; the kernel refuses it
        return num_experts - 1
    return min(num_experts - 1, jnp.iinfo(ids.dtype).max)  # of uint8, 256 would be 0


def check_blocks(op: str, argument: str, rows: int, group_ends: jax.Array, whole: bool) -> None:
    """Check that group ends fit the rows. whole: both must be multiples of 32, for a weight gradient along the
    tokens."""
    remedy = "the weight gradient quantizes along them; use pad_token_groups=True"
    if whole:
        require_multiple(op, argument, rows, BLOCK, "rows", remedy)
    check_ends(op, group_ends, rows, BLOCK if whole else 1)


def check_ends(op: str, group_ends: jax.Array, rows: int, multiple: int) -> None:
    """Check that group ends do not decrease, do not pass the rows and are multiples of `multiple`."""
    steps = jnp.diff(group_ends, prepend=0, append=rows)
    ok = (steps >= 0).all() & (group_ends % multiple == 0).all()
    what = "multiples of 32 that do not decrease" if multiple > 1 else "ends that do not decrease"
    check_values(
        ok, op, "group_ends", group_ends, f"allowed: {what}, at most {rows}, the rows; counts go to group_sizes="
    )


def check_counts(op: str, counts: jax.Array, parts: int, rows: int, argument: str = "num_tokens_per_expert") -> None:
    """Check that counts are at least 0 and that the sum of each of their `parts` parts is at most `rows`."""
    each = counts.astype(jnp.int32).reshape(parts, -1)
    # Sums of the high and low 16 bits: the sum of int32 counts may overflow an int32.
    low = (each & 0xFFFF).sum(1)
    high, low = (each >> 16).sum(1) + (low >> 16), low & 0xFFFF
    rows_high, rows_low = rows // 2**16, rows % 2**16  # not by bits: rows may be a symbol of jax.export
    fits = (high < rows_high) | ((high == rows_high) & (low <= rows_low))
    # A count of another dtype that an int32 does not hold is negative here, or another number.
    ok = (each >= 0).all() & (each.reshape(counts.shape) == counts).all() & fits.all()
    allowed = f"allowed: counts of at least 0 that sum to at most {rows}, the rows they count"
    check_values(ok, op, argument, counts, allowed)
