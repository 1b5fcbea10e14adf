"""The transforms of the differentiable functions: reverse mode, once. Others raise an error with the function's name.

f(x)  =  the kernels' f of guard(x)        guard: the identity, on every float argument

jax.grad, jax.vjp              the tangent of guard is `linear`, which JAX transposes and never runs
jax.jvp, jacfwd, linearize     run `linear`: NotImplementedError
jax.vmap                       guard: NotImplementedError
grad of grad, of an op         the kernels' primitive (call.py) has no derivative: NotImplementedError
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...core_kernels.launch import fail
from .call import vary_alike, whole
from .checks import warn_caller
from .split import alike

_guard_p, _linear_p = Primitive("mxep_guard"), Primitive("mxep_linear")


def reverse_only(
    op: str, tree: Any, rows: str = "all rows in one call", together: str = "", gather: bool = True
) -> Any:
    """The arguments of `op`, on which every other transform raises. rows: the remedy for a vmap. together: a warning,
    with {op} and {count}, if a program is compiled for several devices outside of a shard_map over all of them.
    gather: make them `whole`."""
    given = {"op": op, "rows": rows, "together": together}

    def guarded(leaf: jax.Array) -> jax.Array:
        leaf = whole(leaf) if gather else leaf
        return _guard_p.bind(leaf, **given) if _is_float(leaf) else leaf

    return jax.tree.map(guarded, tree)


def arguments(op: str, *trees: Any) -> tuple[Any, ...]:
    """`vary_alike` and `reverse_only` of the arguments of a differentiable function."""
    return reverse_only(op, vary_alike(*trees))


def arguments_by_rows(op: str, *arrays: Any) -> tuple[Any, ...]:
    """`arguments` of a function that works row by row: rows of arrays (M, ...) remain sharded over explicit axes."""
    return reverse_only(op, alike(vary_alike(*arrays), 1), gather=False)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _guard_jvp(primals, tangents, *, op: str, rows: str, together: str):
    (x,), (tangent,) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        tangent = _linear_p.bind(tangent, op=op)
    return _guard_p.bind(x, op=op, rows=rows, together=together), tangent


def _no_forward_mode(*_args, op: str, **_params):
    allowed = "allowed: jax.grad and jax.vjp, once"
    fail(NotImplementedError, op, "transform", "forward mode (jax.jvp, jacfwd, linearize, hessian)", allowed)


def _no_vmap(*_args, op: str, rows: str, together: str):
    fail(NotImplementedError, op, "transform", "jax.vmap", f"allowed: {rows}, without the vmap; or jax.lax.map")


def _lower_guard(ctx, x, *, op: str, rows: str, together: str):
    # The context of jit counts devices; the context of shard_map has a mesh, with manual axes and others.
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    automatic = [] if mesh is None else [n for axis, n in mesh.shape.items() if axis not in context.manual_axes]
    count = context.num_devices if mesh is None else math.prod(automatic)
    if together and count > 1:
        warn_caller(together.format(op=op, count=count))
    return [x]


_guard_p.def_impl(lambda x, **_: x)
_guard_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_guard_p, _lower_guard)
ad.primitive_jvps[_guard_p] = _guard_jvp
batching.primitive_batchers[_guard_p] = _no_vmap

_linear_p.def_impl(_no_forward_mode)
_linear_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_linear_p, _no_forward_mode)
ad.primitive_jvps[_linear_p] = _no_forward_mode
ad.primitive_transposes[_linear_p] = lambda ct, _x, **_: [ct]
batching.primitive_batchers[_linear_p] = _no_forward_mode
