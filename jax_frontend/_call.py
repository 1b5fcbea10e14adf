"""From a launch description to arrays: the only file that knows how an op reaches a device.

    KernelOp + arrays + options
       |-- plan:  checks, shapes, dtypes              (core_kernels; user errors, once, at the call)
       |-- one JAX primitive, traced like any other
       '-- lowering, when the platform is known:
             cpu    the C++ kernel as an XLA FFI call; a grouped GEMM: jax matmuls (_cpu_gemm.py)
             cuda   the CUDA C++ kernel as an XLA FFI call, where there is one (_device.py);
                    otherwise the Triton kernel through jax-triton (_triton.py), or other ops, composed

A primitive rather than `jax.lax.platform_dependent`: that traces the branch of every platform, so a
CPU process would import jax-triton, while a lowering rule runs for its own platform alone.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from .. import cpp_bindings
from ..core_kernels.fold import plan_both as both_fold
from ..core_kernels.launch import ArrayType, KernelOp, Launch, fail
from . import _device
from ._checks import dtype_name, rounding_of

Options = tuple[tuple[str, int | bool | str], ...]

CPP_TARGETS = {name: f"mxep.{name}" for name in cpp_bindings.ffi_targets()}
for _name, _capsule in cpp_bindings.ffi_targets().items():
    jax.ffi.register_ffi_target(CPP_TARGETS[_name], _capsule, platform="cpu")

CUDA_TARGETS = {name: f"mxep.cuda.{name}" for name in cpp_bindings.CUDA_OPS}
for _name, _capsule in cpp_bindings.cuda_ffi_targets().items():
    jax.ffi.register_ffi_target(CUDA_TARGETS[_name], _capsule, platform="CUDA")


def array_type(x: jax.Array | jax.ShapeDtypeStruct) -> ArrayType:
    return ArrayType(tuple(x.shape), np.dtype(x.dtype).name)


def varying_axes(*arrays: jax.Array) -> tuple[str, ...]:
    """The mesh axes of an enclosing `shard_map` along which any of the arrays varies."""
    axes: frozenset[str] = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))
    return tuple(sorted(axes))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Mark x as varying along more axes of the enclosing `shard_map`; the value stays the same."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*trees):
    """Arguments that vary along one set of mesh axes. JAX transposes the cast: the gradient of an argument
    that is replicated while others are not is summed over the mesh, as it must be."""
    axes = varying_axes(*jax.tree.leaves(trees))
    return jax.tree.map(lambda x: vary(x, axes), trees)


def _option(op: KernelOp, name: str, value: object) -> int | bool | str:
    """An option as plans take it, from what the user gave, or a plan."""
    if name == "rounding" and not isinstance(value, int):
        return rounding_of(op.name, name, value)
    if name == "out_dtype":
        return dtype_name(op.name, name, value)
    if not isinstance(value, int | str):
        fail(TypeError, op.name, name, repr(value), "allowed: an int, a bool or a name")
    return value


def call(op: KernelOp, *arrays: jax.Array, **options: object) -> tuple[jax.Array, ...]:
    """Run one op on arrays and return its outputs; works under jit, shard_map and remat.

    Raises ValueError or TypeError (see `KernelOp.plan`) while tracing, and NotImplementedError while
    lowering where the platform has no kernel for the op.
    """
    for name, x in zip(op.inputs, arrays, strict=False):
        if not isinstance(x, jax.Array | np.ndarray):
            fail(TypeError, op.name, name, type(x).__name__, "allowed: a jax array")
    given = {name: _option(op, name, value) for name, value in options.items()}
    op.plan(*map(array_type, arrays), arch="cpu", **given)
    # A kernel's outputs vary wherever one of its inputs does; a primitive of ours has no rule for it.
    axes = varying_axes(*arrays)
    outputs = _kernel_p.bind(*arrays, op=op, options=tuple(sorted(given.items())))
    return tuple(vary(x, axes) for x in outputs)


_kernel_p = Primitive("mxep_kernel")
_kernel_p.multiple_results = True
_kernel_p.def_impl(partial(xla.apply_primitive, _kernel_p))


@_kernel_p.def_abstract_eval
def _abstract_eval(*avals, op: KernelOp, options: Options):
    launch = op.plan(*map(array_type, avals), arch="cpu", **dict(options))
    return [_aval(out) for out in launch.out]


def _aval(out: ArrayType) -> ShapedArray:
    return ShapedArray(out.shape, np.dtype(out.dtype))


def _ffi_call(ctx, target: str, launch: Launch, *operands):
    """The op's outputs; what its kernel needs besides them ends there."""
    attrs = np.array([int(a) for a in launch.attrs], np.int64)
    written = ctx.replace(avals_out=[_aval(out) for out in launch.out])
    return jax.ffi.ffi_lowering(target)(written, *operands, attrs=attrs)[: len(ctx.avals_out)]


def _lower_cpu(ctx, *operands, op: KernelOp, options: Options):
    from . import _cpu_gemm

    _device.choose_on_cpu(op, _device.forced())
    launch = op.plan(*map(array_type, ctx.avals_in), arch="cpu", **dict(options))
    if op.name in CPP_TARGETS:
        return _ffi_call(ctx, CPP_TARGETS[op.name], launch, *operands)
    if op.name in _cpu_gemm.GEMMS:
        gemm = partial(_cpu_gemm.GEMMS[op.name], out=launch.out[0])
        return mlir.lower_fun(gemm, multiple_results=False)(ctx, *operands)
    fail(NotImplementedError, op.name, "platform", "cpu", "allowed: cuda; this op has no CPU kernel")


def _lower_cuda(ctx, *operands, op: KernelOp, options: Options):
    from . import _triton

    implementation, arch = _device.choose_on_cuda(op, _device.forced())
    launch = op.plan(*map(array_type, ctx.avals_in), arch=arch, **dict(options))
    if implementation == "cuda" and launch.not_in_cuda:
        if _device.forced() == "cuda":
            fail(NotImplementedError, op.name, "platform", "cuda with 'cuda' forced", launch.not_in_cuda)
        implementation = _device.without_cuda(op)
    if implementation == "cuda" and all(launch.grid):
        return _ffi_call(ctx, CUDA_TARGETS[op.name], launch, *operands)
    if implementation == "parts":
        return mlir.lower_fun(partial(COMPOSED[op], **dict(options)), multiple_results=True)(ctx, *operands)
    return mlir.lower_fun(partial(_triton.call, op, launch), multiple_results=True)(ctx, *operands)


COMPOSED = {both_fold.quantize_both_fold: partial(both_fold.composed, call)}
"""The ops that `both_fold.PARTS` names, of their parts."""

mlir.register_lowering(_kernel_p, _lower_cpu, platform="cpu")
mlir.register_lowering(_kernel_p, _lower_cuda, platform="cuda")


def _no_vmap(*_args, op: KernelOp, **_params):
    fail(NotImplementedError, op.name, "transform", "jax.vmap", "allowed: batch dims of the op itself, or jax.lax.map")


def _no_derivative(*_args, op: KernelOp, **_params):
    allowed = "allowed: jax.grad, once, of the functions of mxep.jax_frontend, or jax.lax.stop_gradient of its inputs"
    fail(NotImplementedError, op.name, "transform", "a derivative of the op itself, or a second one", allowed)


batching.primitive_batchers[_kernel_p] = _no_vmap
ad.primitive_jvps[_kernel_p] = _no_derivative


def jitted(function: Callable, *static: int) -> Callable:
    """One program of `function`, inlined into what calls it; jax.disable_jit() leaves it one.

    Eager shard_map takes no custom_vjp with symbolic zeros, and jaxlib 0.11.2 no empty array across the parts that it
    compiles by itself.
    """
    program = jax.jit(function, static_argnums=static, inline=True)

    def run(*arguments):
        with jax.disable_jit(False):
            return program(*arguments)

    return run
