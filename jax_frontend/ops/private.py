"""Every private name of JAX that this package uses, with a public way to the same check.

Where JAX lacks one of the names, the public way runs. The choice is made once, at import. This is not a version shim:
both ways report the same errors on the same JAX, and tests/jax_frontend/ops/test_private.py runs both.
"""

import pkgutil
from collections.abc import Callable
from typing import Any

import jax
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


def _public_check_later(ok: jax.Array, message: str, got: jax.Array) -> None:
    checkify.debug_check(ok, message, got=got)


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
        error = _assert(*context, error, ~ok, _failed(_traceback(), message, got=got))
    return error, []


def _under_vmap(arguments, dims, *, message: str):
    ok, got = arguments
    _check_p.bind(ok.all(), got, message=message)
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
"""check_later(ok, message, got): report `message`, formatted with `got`, to an enclosing `checkify.checkify` unless the
scalar `ok` holds."""
