"""Every private name of JAX that this package uses, with a public way to the same check.

Where JAX lacks one of the names, the public way runs. The choice is made once, at import. This is not a version shim:
both ways report the same errors on the same JAX, and tests/jax_frontend/ops/test_private.py runs both.
"""

import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _private(name: str) -> Any:
    """The object named "module:attribute", or None if this JAX has no such name."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


# --- A check of a value inside a traced program, for `checkify.checkify` ---


def describe(ok: jax.Array, got: jax.Array) -> tuple[str, dict[str, jax.Array]]:
    """A format string, and its fields: all of got for a scalar `ok`; for an array `ok` the first value of got that is
    not ok, and its index. Reductions alone: any sharding allows them, and every device gets the result."""
    if not ok.ndim:
        return "{got}", {"got": got}
    indices = [jax.lax.broadcasted_iota(jnp.int32, ok.shape, dim) for dim in range(ok.ndim)]
    place = indices[0]
    for dim in range(1, ok.ndim):
        place = place * ok.shape[dim] + indices[dim]
    most = jnp.iinfo(jnp.int32).max
    first = place == jnp.where(ok, most, place).min(initial=most)
    value = jnp.where(first, got, 0).sum(dtype=got.dtype)
    fields = {f"index{dim}": jnp.where(first, index, 0).sum() for dim, index in enumerate(indices)}
    names = ", ".join(f"{{{name}}}" for name in fields)
    return f"{{got}} at index {names if ok.ndim == 1 else f'({names})'}", {"got": value, **fields}


def _public_check_later(ok: jax.Array, message: str, got: jax.Array) -> None:
    text, fields = describe(ok, got)
    checkify.debug_check(ok.all(), message.replace("{got}", text), **fields)


_failed = _private("jax._src.checkify:FailedCheckError")
_assert = _private("jax._src.checkify:assert_func")
_rules = _private("jax._src.checkify:error_checks")
_traceback = _private("jax._src.checkify:get_traceback")
_check_p = Primitive("mxep_check")
_check_p.multiple_results = True


def _private_check_later(ok: jax.Array, message: str, got: jax.Array) -> None:
    _check_p.bind(ok, got, message=message)


def _under_checkify(*arguments, message: str):
    *context, error, enabled, ok, got = arguments  # JAX 0.10 has no context, 0.11 has one in front
    if _failed in enabled:
        text, fields = describe(ok, got)
        failed = _failed(_traceback(), message.replace("{got}", text), **fields)
        error = _assert(*context, error, ~ok.all(), failed)
    return error, []


def _under_vmap(arguments, dims, *, message: str):
    ok, got = (jnp.moveaxis(x, dim, 0) if dim is not None else x[None] for x, dim in zip(arguments, dims, strict=True))
    ok, got = (ok.all(), got) if ok.ndim == 1 else jnp.broadcast_arrays(ok, got)
    _check_p.bind(ok, got, message=message)
    return [], []


_check_p.def_impl(lambda *_, **__: [])
_check_p.def_abstract_eval(lambda *_, **__: [])
batching.primitive_batchers[_check_p] = _under_vmap
ad.primitive_jvps[_check_p] = lambda primals, _, **params: (_check_p.bind(*primals, **params), [])
mlir.register_lowering(_check_p, lambda *_, **__: [])

has_checks = None not in (_failed, _assert, _rules, _traceback)
"""Whether `check_later` is a primitive. It has no effect: checkify finds it, every other transform drops it, and
`jax.export` serializes a program with it. Not so with the effect of the public way."""
if has_checks:
    _rules[_check_p] = _under_checkify

check_later: Callable[[jax.Array, str, jax.Array], None] = _private_check_later if has_checks else _public_check_later
"""check_later(ok, message, got): report `message`, whose field {got} is of `describe`, to an enclosing
`checkify.checkify` unless all of `ok` holds."""
