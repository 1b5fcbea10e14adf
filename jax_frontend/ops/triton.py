"""Triton kernels on CUDA through jax-triton; no other file imports it.

Launch: inputs, scalars, outputs, constexprs  -->  jax_triton.triton_call  -->  PTX inside the program
"""

import os
from functools import cache
from types import ModuleType

import jax
import jax.numpy as jnp

from ...core_kernels.launch import KernelOp, Launch
from . import device

TRITON_TARGET = "triton_kernel_call"
"""The custom call of jax-triton."""


@cache
def _jax_triton() -> ModuleType:
    # Importing jax-triton 0.3.1 sets TRITON_CACHE_DIR to "" for the whole process, and all other users of triton in the
    # process would lose the cache.
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    except ImportError as error:
        raise ImportError(
            "mxep.jax_frontend: CUDA needs jax-triton and JAX's CUDA plugin: pip install 'mxep[jax-cuda]'"
        ) from error
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


def call(op: KernelOp, launch: Launch, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Launch the op's Triton kernel; its outputs are fresh buffers that it writes completely."""
    out_shape = [jax.ShapeDtypeStruct(out.shape, jnp.dtype(out.dtype)) for out in launch.out]
    if not all(launch.grid):
        return tuple(jnp.zeros(out.shape, out.dtype) for out in out_shape)
    lowered_for = device.lowered_for()
    outputs = _jax_triton().triton_call(
        *arrays,
        *launch.scalars.values(),
        kernel=op.triton_kernel(),
        out_shape=out_shape,
        grid=launch.grid,
        name=op.name,
        custom_call_target_name=TRITON_TARGET,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,  # as in torch_frontend/ops/launch.py: kernels call fma where it is meant
        compute_capability=lowered_for and 10 * lowered_for[0] + lowered_for[1],
        **launch.meta,
    )
    return tuple(outputs)
