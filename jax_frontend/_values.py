"""A check of a value inside a traced program, for `checkify.checkify`.

`checkify.debug_check` does the same with an effect, and `jax.export` serializes no program with its effect. The check
here has none: checkify finds it, every other transform drops it.
"""

import jax
from jax._src.checkify import FailedCheckError, assert_func, error_checks, get_traceback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_check_p = Primitive("mxep_check")
_check_p.multiple_results = True


def check_later(ok: jax.Array, message: str, got: jax.Array) -> None:
    """Report `message`, formatted with `got`, to an enclosing `checkify.checkify` unless the scalar `ok` holds."""
    _check_p.bind(ok, got, message=message)


def _under_checkify(error, enabled, ok, got, *, message: str):
    if FailedCheckError in enabled:
        error = assert_func(error, ~ok, FailedCheckError(get_traceback(), message, got=got))
    return error, []


def _under_vmap(arguments, dims, *, message: str):
    ok, got = arguments
    _check_p.bind(ok.all(), got, message=message)
    return [], []


_check_p.def_impl(lambda *_, **__: [])
_check_p.def_abstract_eval(lambda *_, **__: [])
error_checks[_check_p] = _under_checkify
batching.primitive_batchers[_check_p] = _under_vmap
ad.primitive_jvps[_check_p] = lambda primals, _, **params: (_check_p.bind(*primals, **params), [])
mlir.register_lowering(_check_p, lambda *_, **__: [])
