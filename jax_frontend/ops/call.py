"""A call of an op on arrays: one JAX primitive, traced like any other.

    KernelOp + arrays + options
       |-- signature:  checks, shapes, dtypes        (core_kernels; user errors while tracing)
       |-- one primitive with the op and its options as parameters
       '-- lowering, when the platform is known      (launch.py)

`jax.lax.platform_dependent` instead of a primitive would trace the branch of every platform, so a CPU process would
import jax-triton. A lowering rule runs for its own platform alone.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, xla
from jax.sharding import NamedSharding, PartitionSpec

from ...core_kernels.launch import ArrayType, KernelOp, fail, require_ends_of
from .checks import dtype_name, reads_values, rounding_of
from .split import over_parts

Options = tuple[tuple[str, int | bool | float | str], ...]
Empty = tuple[tuple[int, str], ...]
"""The index and the dtype of each input of shape (0,), which stands for an argument that is None."""


def array_type(x: jax.Array | jax.ShapeDtypeStruct) -> ArrayType:
    return ArrayType(tuple(x.shape), np.dtype(x.dtype).name)


def aval(out: ArrayType) -> ShapedArray:
    return ShapedArray(out.shape, np.dtype(out.dtype))


def varying_axes(*arrays: jax.Array) -> tuple[str, ...]:
    """The mesh axes of an enclosing `shard_map` along which any of the arrays varies."""
    axes: frozenset[str] = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))
    return tuple(sorted(axes))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mark x as varying along more axes of the enclosing `shard_map`; the value stays the same."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def whole(x: jax.Array) -> jax.Array:
    """x on every device of mesh axes that are explicit in its type; the gradient is split as x was. For kernels that
    split.py does not divide; a program with automatic axes gathers their inputs without a trace in the types."""
    sharding = jax.typeof(x).sharding
    if all(part is None for part in sharding.spec):
        return x
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def vary_alike(*trees):
    """Arguments that vary along one set of mesh axes. JAX transposes the cast: the gradient of an argument that is
    replicated while others are not is summed over the mesh."""
    axes = varying_axes(*jax.tree.leaves(trees))
    return jax.tree.map(lambda x: vary(x, axes), trees)


def rounded(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """fp32 rounded to a float dtype. XLA drops a conversion to bf16 and back in some programs, but not
    reduce_precision."""
    info = jax.numpy.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def _option(op: KernelOp, name: str, value: Any) -> Any:
    """An option as `KernelOp.check` takes it."""
    if name == "rounding" and not isinstance(value, int):
        return rounding_of(op.name, name, value)
    if name == "out_dtype":
        return dtype_name(op.name, name, value)
    if not isinstance(value, int | float | str) and not is_symbolic_dim(value):
        fail(TypeError, op.name, name, repr(value), "allowed: a number, a bool or a name")
    return value


def _check_ends(op: KernelOp, arrays: Sequence[jax.Array], tokens: tuple[int, int] | None) -> None:
    """Raise ValueError for group ends that end no groups of the tokens, where reading them waits for no GPU. The number
    of tokens may be a symbol of jax.export, with which nothing is compared."""
    if tokens is None or not isinstance(tokens[0], int):
        return
    ends = arrays[op.inputs.index("group_ends")]
    if reads_values(ends):
        require_ends_of(op, np.asarray(ends).tolist(), tokens)


def call(op: KernelOp, *arrays: jax.Array, **options: object) -> tuple[jax.Array, ...]:
    """Run one op on arrays and return its outputs; works under jit, shard_map and remat.

    Raises ValueError or TypeError (see `KernelOp.check`) while tracing, and NotImplementedError while lowering where
    the platform has no kernel for the op.
    """
    if op.optional_ends:
        arrays = op.complete(arrays, jax.numpy.zeros(0, "int32"))
    for name, x in zip(op.inputs, arrays, strict=False):
        if not isinstance(x, jax.Array | np.ndarray):
            fail(TypeError, op.name, name, type(x).__name__, "allowed: a jax array")
    given = {name: _option(op, name, value) for name, value in options.items()}
    signature = op.signature(*map(array_type, arrays), **given)  # here the traceback ends in the user's call
    for name, value in signature.attrs.items():
        if is_symbolic_dim(value):
            allowed = "allowed: a number, which is part of the program; export a program for each number of tokens"
            fail(NotImplementedError, op.name, name, f"{value}, a symbol of jax.export", allowed)
    _check_ends(op, arrays, signature.tokens)

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        # The outputs of a kernel vary wherever one of its inputs does; JAX has no such rule for a new primitive.
        axes = varying_axes(*arrays)
        # The lowering makes empty inputs: jaxlib 0.11.2 ends the process when one crosses the boundary of a shard_map,
        # as a constant of a jaxpr does that JAX moves out of a scan.
        empty = tuple((i, array_type(x).dtype) for i, x in enumerate(arrays) if x.shape == (0,))
        full = (x for x in arrays if x.shape != (0,))
        outputs = kernel_p.bind(*full, op=op, options=tuple(sorted(given.items())), empty=empty)
        return tuple(vary(x, axes) for x in outputs)

    parts = over_parts(op, run, arrays, signature.out)
    return run(*map(whole, arrays)) if parts is None else parts


kernel_p = Primitive("mxep_kernel")
kernel_p.multiple_results = True
kernel_p.def_impl(partial(xla.apply_primitive, kernel_p))


def with_empty(arrays: Sequence[Any], empty: Empty, make: Callable[[ArrayType], Any]) -> list[Any]:
    """The inputs of the op: the inputs of the primitive, and `make` of each empty input."""
    inputs = list(arrays)
    for place, dtype in empty:
        inputs.insert(place, make(ArrayType((0,), dtype)))
    return inputs


@kernel_p.def_abstract_eval
def _abstract_eval(*avals, op: KernelOp, options: Options, empty: Empty):
    inputs = with_empty(list(map(array_type, avals)), empty, lambda none: none)
    return list(map(aval, op.signature(*inputs, **dict(options)).out))


def _no_vmap(*_args, op: KernelOp, **_params):
    # jax.jacrev is a vmap of the gradient, so its error comes from an op.
    allowed = "allowed: batch dims of the op itself, jax.lax.map, and jax.vjp in place of jax.jacrev"
    fail(NotImplementedError, op.name, "transform", "jax.vmap", allowed)


def _no_derivative(*_args, op: KernelOp, **_params):
    allowed = "allowed: jax.grad, once, of the functions of mxep.jax_frontend, or jax.lax.stop_gradient of its inputs"
    fail(NotImplementedError, op.name, "transform", "a derivative of the op itself, or a second one", allowed)


batching.primitive_batchers[kernel_p] = _no_vmap
ad.primitive_jvps[kernel_p] = _no_derivative


def jitted(function: Callable, *static: int) -> Callable:
    """One program of `function`, inlined into its caller; also inside jax.disable_jit().

    Eager shard_map takes no custom_vjp with symbolic zeros, and jaxlib 0.11.2 no empty array across the parts that it
    compiles by itself.
    """
    program = jax.jit(function, static_argnums=static, inline=True)

    def run(*arguments):
        with jax.disable_jit(False):
            return program(*arguments)

    return run
