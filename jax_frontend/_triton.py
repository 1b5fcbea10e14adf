"""Triton kernels on CUDA through jax-triton: the only file that imports it.

Launch: inputs, scalars, outputs, constexprs  -->  jax_triton.triton_call  -->  PTX inside the program
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import jax
import jax.numpy as jnp

from ..core_kernels.launch import KernelOp, Launch, fail

_CAPABILITIES = {"sm_90": 90, "sm_100": 100}
# Part of the key of JAX's caches: what was lowered for one architecture is not taken for another.
_forced = jax.make_user_context(None)


@cache
def _jax_triton() -> ModuleType:
    # Importing jax-triton 0.3.1 sets TRITON_CACHE_DIR to "" for the whole process, and every other user of
    # triton in it would lose the cache.
    before = os.environ.get("TRITON_CACHE_DIR")
    try:
        import jax_triton
    except ImportError as error:
        raise ImportError(
            "mxep.jax_frontend: CUDA needs jax-triton and JAX's CUDA plugin: pip install 'mxep[jax-cuda]' 'jax[cuda13]'"
        ) from error
    finally:
        os.environ.pop("TRITON_CACHE_DIR", None)
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


@contextmanager
def lower_for(arch: str) -> Iterator[None]:
    """Within the block CUDA programs are lowered for "sm_90" or "sm_100", whatever this machine has:
    `with lower_for("sm_90"): jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))`.

    Raises ValueError for another architecture.
    """
    if arch not in _CAPABILITIES:
        fail(ValueError, "lower_for", "arch", repr(arch), f"allowed: {', '.join(map(repr, _CAPABILITIES))}")
    with _forced(arch):
        yield


def arch() -> str:
    """The architecture that plans know: of `lower_for`, or of the first CUDA device.

    Raises NotImplementedError without a device of sm_89 or newer.
    """
    if _forced.value:
        return _forced.value
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:
        allowed = "allowed: a CUDA device, or lowering inside lower_for('sm_90')"
        fail(NotImplementedError, "mxep", "device", "no CUDA device", allowed)
    major, minor = map(int, str(capability).split("."))
    if (major, minor) < (8, 9):
        fail(NotImplementedError, "mxep", "device", f"sm_{major}{minor}", "allowed: sm_89 and newer")
    return "sm_100" if major in (10, 11) else "sm_90"


def call(op: KernelOp, launch: Launch, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Launch the op's Triton kernel; its outputs are fresh buffers that it writes completely."""
    if op.kernel is None:
        fail(NotImplementedError, op.name, "platform", "cuda", "allowed: cpu; this op has no Triton kernel")
    out_shape = [jax.ShapeDtypeStruct(out.shape, jnp.dtype(out.dtype)) for out in launch.out]
    if not all(launch.grid):
        return tuple(jnp.zeros(out.shape, out.dtype) for out in out_shape)
    outputs = _jax_triton().triton_call(
        *arrays,
        *launch.scalars.values(),
        kernel=op.kernel,
        out_shape=out_shape,
        grid=launch.grid,
        name=op.name,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        compute_capability=_CAPABILITIES[_forced.value] if _forced.value else None,
        **launch.meta,
    )
    return tuple(outputs)
