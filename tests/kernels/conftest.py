"""Runs the kernel of an op, Triton in its interpreter or C++, on guarded buffers that reveal accesses outside."""

import os
import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from mxep import cpp_bindings
from mxep.core_kernels.launch import ArrayType, KernelOp

# TRITON_INTERPRET is read when triton is imported; a process in the interpreter cannot compile.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# What starts no kernel of this process is the same in both: compilers of C++ headers, and processes without triton.
collect_ignore_glob = (
    ["*test_cross_compile*.py", "*test_cuda_build.py", "*test_cpp_*.py", "*headers*", "*test_without_triton.py"]
    if INTERPRETED
    else ["*test_triton_*.py"]
)
GUARD = 4096


def _guarded(nbytes: int) -> torch.Tensor:
    """`nbytes` between two guards, every byte 0xFF: NaN in E4M3, E8M0, bf16 and f32, and -1 in int32."""
    return torch.full((nbytes + 2 * GUARD,), 0xFF, dtype=torch.uint8)


def _view(buffer: torch.Tensor, array: ArrayType) -> torch.Tensor:
    return buffer[GUARD:-GUARD].view(getattr(torch, array.dtype)).view(array.shape)


def array_type(x: np.ndarray) -> ArrayType:
    return ArrayType(x.shape, x.dtype.name)


def _run_guarded(op: KernelOp, run: Callable[[list, list], object], *inputs: np.ndarray, **options):
    """numpy in, numpy out. Reads outside an input give NaN; writes outside an output fail the test."""
    args = []
    for x in inputs:
        buffer = _guarded(x.nbytes)
        buffer[GUARD:-GUARD] = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy())
        args.append(_view(buffer, array_type(x)))
    out = op.signature(*map(array_type, inputs), **options).out
    buffers = [_guarded(int(np.prod(a.shape)) * getattr(torch, a.dtype).itemsize) for a in out]
    outs = [_view(buffer, a) for buffer, a in zip(buffers, out, strict=True)]
    run(args, outs)
    for name, buffer in zip(op.outputs, buffers, strict=True):
        guards = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
        assert bool((guards == 0xFF).all()), f"{op.name} wrote outside of {name}"
    # numpy lacks bf16
    return tuple(
        out.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if out.dtype == torch.bfloat16 else out.numpy()
        for out in outs
    )


def run_interpreted(op: KernelOp, *inputs: np.ndarray, **options) -> tuple[np.ndarray, ...]:
    inputs = op.complete(inputs, np.zeros(0, np.int32))
    launch = op.launch(*map(array_type, inputs), arch="interpreter", **options)
    if op.compose is not None and all(launch.grid):
        return op.compose(run_interpreted, *inputs, **options)

    def run(args: list, outs: list) -> None:
        if 0 in launch.grid:
            return
        numbers = {**launch.meta, "num_warps": launch.num_warps, "num_stages": launch.num_stages}
        # The interpreter converts run-time loop bounds in a way that numpy deprecates.
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            op.triton_kernel()[launch.grid](*args, *launch.scalars.values(), *outs, **numbers)

    return _run_guarded(op, run, *inputs, **options)


def run_cpp(op: KernelOp, *inputs: np.ndarray, **options) -> tuple[np.ndarray, ...]:
    inputs = op.complete(inputs, np.zeros(0, np.int32))
    attrs = tuple(op.signature(*map(array_type, inputs), **options).attrs.values())
    return _run_guarded(op, lambda args, outs: cpp_bindings.run(op.name, args, outs, attrs), *inputs, **options)


@pytest.fixture(scope="session")
def triton_op():
    return run_interpreted


@pytest.fixture(scope="session")
def cpp_op():
    return run_cpp


@pytest.fixture(scope="session")
def guarded_op():
    """The implementation of this process: Triton's interpreter if selected, else C++."""
    return run_interpreted if INTERPRETED else run_cpp
