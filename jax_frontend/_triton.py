"""Triton kernels on CUDA through jax-triton: the only file that imports it.

Launch: inputs, scalars, outputs, constexprs  -->  jax_triton.triton_call  -->  PTX inside the program
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np

from ..core_kernels.launch import KernelOp, Launch, fail

# Importing jax-triton 0.3.1 sets TRITON_CACHE_DIR to "" for the whole process: every other user of
# triton in it would lose the cache.
_cache_dir = os.environ.get("TRITON_CACHE_DIR")
try:
    import jax_triton
except ImportError as error:
    raise ImportError(
        "mxep.jax_frontend: CUDA needs jax-triton and JAX's CUDA plugin: pip install 'mxep[jax-cuda]' 'jax[cuda13]'"
    ) from error
finally:
    if _cache_dir is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = _cache_dir

_CAPABILITIES = {"sm_90": 90, "sm_100": 100}
_forced: str | None = None


@contextmanager
def lower_for(arch: str) -> Iterator[None]:
    """Within the block lower CUDA programs for "sm_90" or "sm_100" whatever this machine has, for
    ahead-of-time compilation without a GPU: `with lower_for("sm_90"): traced.lower(lowering_platforms=("cuda",))`.
    """
    global _forced
    if arch not in _CAPABILITIES:
        fail(ValueError, "lower_for", "arch", repr(arch), f"allowed: {', '.join(map(repr, _CAPABILITIES))}")
    before, _forced = _forced, arch
    try:
        yield
    finally:
        _forced = before


def arch() -> str:
    """The architecture that plans know, of the first CUDA device or of `lower_for`."""
    if _forced:
        return _forced
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:
        fail(
            NotImplementedError,
            "mxep",
            "device",
            "no CUDA device",
            "allowed: a GPU, or lowering within lower_for('sm_90')",
        )
    major, minor = map(int, str(capability).split("."))
    if (major, minor) < (8, 9):
        fail(NotImplementedError, "mxep", "device", f"sm_{major}{minor}", "allowed: sm_89 and newer")
    return "sm_100" if major in (10, 11) else "sm_90"


def call(op: KernelOp, launch: Launch, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Launch the op's Triton kernel; the outputs are fresh buffers that it writes completely."""
    if op.kernel is None:
        fail(NotImplementedError, op.name, "platform", "cuda", "allowed: cpu; this op has no Triton kernel")
    out_shape = [jax.ShapeDtypeStruct(out.shape, np.dtype(out.dtype)) for out in launch.out]
    if not all(launch.grid):
        return tuple(jax.numpy.zeros(out.shape, out.dtype) for out in out_shape)
    return tuple(
        jax_triton.triton_call(
            *arrays,
            *launch.scalars.values(),
            kernel=op.kernel,
            out_shape=out_shape,
            grid=launch.grid,
            name=op.name,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            compute_capability=_CAPABILITIES[_forced] if _forced else None,
            **launch.meta,
        )
    )
