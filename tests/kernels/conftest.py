"""Runs a plan's kernel, Triton's in the interpreter or C++, on guarded buffers that reveal reads and writes outside."""

import os
import warnings
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from mxep import cpp_bindings
from mxep.core_kernels.launch import ArrayType, KernelOp, Launch

# TRITON_INTERPRET is read when triton is imported; a process in the interpreter cannot compile.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = (
    ["test_cross_compile.py", "test_cuda_build.py", "test_cpp_*.py"] if INTERPRETED else ["test_triton_*.py"]
)
GUARD = 4096


def _guarded(nbytes: int) -> torch.Tensor:
    """`nbytes` between two guards, every byte 0xFF: NaN in E4M3, E8M0, bf16 and f32, and -1 in int32."""
    return torch.full((nbytes + 2 * GUARD,), 0xFF, dtype=torch.uint8)


def _view(buffer: torch.Tensor, array: ArrayType) -> torch.Tensor:
    return buffer[GUARD:-GUARD].view(getattr(torch, array.dtype)).view(array.shape)


def array_type(x: np.ndarray) -> ArrayType:
    return ArrayType(x.shape, x.dtype.name)


def _run_guarded(op: KernelOp, launch: Callable[[Launch, list, list], None], arch: str, *inputs: np.ndarray, **options):
    """numpy in, numpy out. Reads outside an input give NaN; writes outside an output fail the test."""
    plan = op.plan(*map(array_type, inputs), arch=arch, **options)
    args = []
    for x in inputs:
        buffer = _guarded(x.nbytes)
        buffer[GUARD:-GUARD] = torch.from_numpy(np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy())
        args.append(_view(buffer, array_type(x)))
    buffers = [_guarded(int(np.prod(a.shape)) * getattr(torch, a.dtype).itemsize) for a in plan.out]
    outs = [_view(buffer, a) for buffer, a in zip(buffers, plan.out, strict=True)]
    launch(plan, args, outs)
    for name, buffer in zip(op.outputs, buffers, strict=True):
        guards = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
        assert bool((guards == 0xFF).all()), f"{op.name} wrote outside of {name}"
    # numpy lacks bf16
    return tuple(
        out.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if out.dtype == torch.bfloat16 else out.numpy()
        for out in outs
    )


def run_interpreted(op: KernelOp, *inputs: np.ndarray, **options) -> tuple[np.ndarray, ...]:
    def launch(plan: Launch, args: list, outs: list) -> None:
        if 0 in plan.grid:
            return
        # The interpreter converts run-time loop bounds in a way that numpy deprecates.
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            op.kernel[plan.grid](
                *args, *plan.scalars.values(), *outs, **plan.meta, num_warps=plan.num_warps, num_stages=plan.num_stages
            )

    return _run_guarded(op, launch, "interpreter", *inputs, **options)


def run_cpp(op: KernelOp, *inputs: np.ndarray, **options) -> tuple[np.ndarray, ...]:
    def launch(plan: Launch, args: list, outs: list) -> None:
        cpp_bindings.run(op.name, args, outs, plan.attrs)

    return _run_guarded(op, launch, "cpu", *inputs, **options)


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
