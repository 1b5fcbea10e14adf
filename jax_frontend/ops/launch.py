"""The lowering of an op on each platform.

cpu    the C++ kernel as an XLA FFI call; a grouped GEMM: jax matmuls (cpu_gemm.py)
cuda   the CUDA C++ kernel as an XLA FFI call, where the build has one (device.py); otherwise the Triton kernel through
       jax-triton (triton.py). An op without a Triton kernel is composed of other ops.

Importing this file registers the lowering rules.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.export import is_symbolic_dim
from jax.interpreters import mlir

from ... import cpp_bindings
from ...core_kernels.launch import ArrayType, KernelOp, fail
from . import cpu_gemm, device, split, triton
from .call import Empty, Options, array_type, aval, call, kernel_p, with_empty

CPP_TARGETS = {name: f"mxep.{name}" for name in cpp_bindings.ffi_targets()}
for _name, _capsule in cpp_bindings.ffi_targets().items():
    jax.ffi.register_ffi_target(CPP_TARGETS[_name], _capsule, platform="cpu")

CUDA_TARGETS = {name: f"mxep.cuda.{name}" for name in cpp_bindings.CUDA_OPS}
for _name, _capsule in cpp_bindings.cuda_ffi_targets().items():
    jax.ffi.register_ffi_target(CUDA_TARGETS[_name], _capsule, platform="CUDA")

for _name in split.WHOLE_DIMS:
    for _targets in (CPP_TARGETS, CUDA_TARGETS):
        if _name in _targets:
            jax.ffi.register_ffi_target_as_batch_partitionable(_targets[_name])


def _ffi_call(ctx, op: KernelOp, target: str, written: Sequence[ArrayType], attrs: Sequence[int], *operands):
    """The outputs of the op. `written`: these and scratch memory, which is dropped."""
    context = ctx.replace(avals_out=list(map(aval, written)))
    divided = split.attributes(op, [x.shape for x in ctx.avals_in], [out.shape for out in written])
    lower = jax.ffi.ffi_lowering(target, extra_attributes=divided)
    return lower(context, *operands, attrs=np.array(attrs, np.int64))[: len(ctx.avals_out)]


@cache
def _cpu_product(name: str, out: ArrayType):
    """A jit of its own: one function of the program for all equal products, of eight layers for example."""
    return jax.jit(partial(cpu_gemm.GEMMS[name], out=out))


def _inputs(ctx, operands: Sequence[Any], empty: Empty):
    """The context and the operands with the empty inputs."""
    avals = with_empty(ctx.avals_in, empty, aval)
    operands = with_empty(operands, empty, lambda none: mlir.ir_constant(np.zeros(none.shape, none.dtype)))
    return ctx.replace(avals_in=avals), operands


def _lower_cpu(ctx, *operands, op: KernelOp, options: Options, empty: Empty):
    ctx, operands = _inputs(ctx, operands, empty)
    device.choose(op, "cpu", device.forced())
    out, attrs, _ = op.signature(*map(array_type, ctx.avals_in), **dict(options))
    if op.name in cpu_gemm.GEMMS:
        return mlir.lower_fun(_cpu_product(op.name, out[0]), multiple_results=len(out) > 1)(ctx, *operands)
    return _ffi_call(ctx, op, CPP_TARGETS[op.name], out, tuple(attrs.values()), *operands)


def _lower_cuda(ctx, *operands, op: KernelOp, options: Options, empty: Empty):
    ctx, operands = _inputs(ctx, operands, empty)
    implementation, arch = device.choose(op, "cuda", device.forced())
    launch = op.launch(*map(array_type, ctx.avals_in), arch=arch, **dict(options))
    if implementation == "cuda" and launch.cuda_unsupported:
        implementation, _ = device.choose(op, "cuda", device.forced(), launch.cuda_unsupported)
    if implementation == "cuda" and all(launch.grid):
        return _ffi_call(ctx, op, CUDA_TARGETS[op.name], (*launch.out, *launch.scratch), launch.cuda_attrs, *operands)
    run: Callable[..., Any] = partial(triton.call, op, launch)
    if op.compose is not None and all(launch.grid):
        run = partial(op.compose, call, **dict(options))
    elif symbols := [size for size in (*launch.grid, *launch.scalars.values()) if is_symbolic_dim(size)]:
        allowed = "allowed on a GPU: numbers, with which a Triton kernel is launched; export a program for each"
        fail(NotImplementedError, op.name, "a size", f"{symbols[0]}, a symbol of jax.export", allowed)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _no_platform(ctx, *_operands, op: KernelOp, **_params):
    got = " and ".join(ctx.module_context.platforms)
    allowed = "allowed: cpu and cuda; `jax.eval_shape` gives shapes on every platform"
    fail(NotImplementedError, op.name, "platform", got, allowed)


mlir.register_lowering(kernel_p, _no_platform)
mlir.register_lowering(kernel_p, _lower_cpu, platform="cpu")
mlir.register_lowering(kernel_p, _lower_cuda, platform="cuda")
