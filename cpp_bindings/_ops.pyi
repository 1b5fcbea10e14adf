from collections.abc import Sequence
from typing import Any

def run(name: str, inputs: Sequence[Any], outputs: Sequence[Any], attrs: Sequence[int]) -> None:
    """Run a C++ op on CPU arrays that speak DLPack; writes every byte of `outputs`.

    Releases the GIL. Raises ValueError when the data break the op's contract (a row map that points outside
    its input), for an unknown op, a strided array or one on another device; TypeError for another dtype.
    """

def ffi_targets() -> dict[str, Any]:
    """Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="cpu")`.

    The call takes one attribute, `attrs`, a numpy int64 array. Errors arrive as XLA's INVALID_ARGUMENT.
    """

def num_threads() -> int:
    """Threads that one op may use; the OpenMP default (OMP_NUM_THREADS, or all cores) until set."""

def set_num_threads(n: int) -> None:
    """Set the threads that one op may use, for the whole process. Raises ValueError below 1."""
