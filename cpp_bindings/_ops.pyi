from collections.abc import Sequence
from typing import Any

def run(
    name: str, inputs: Sequence[Any], outputs: Sequence[Any], attrs: Sequence[int], num_threads: int | None = None
) -> None:
    """Run a C++ op on CPU arrays that speak DLPack; writes every byte of `outputs`.

    num_threads: that this call may use, at least 1; None: `num_threads()`. The child of a fork has one.

    Releases the GIL. Raises ValueError when the data break the op's contract (a row map that points outside
    its input), for an unknown op, a strided array or one on another device; TypeError for another dtype.
    """

def ffi_targets() -> dict[str, Any]:
    """Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="cpu")`.

    The call takes one attribute, `attrs`, a numpy int64 array. Errors arrive as XLA's INVALID_ARGUMENT.
    """

def num_threads() -> int:
    """Threads that an op may use where its call says nothing, as XLA's calls do: as many as OpenMP would
    (OMP_NUM_THREADS, or all cores) when the module was loaded; one in the child of a fork."""

cuda_archs: tuple[tuple[int, int], ...]
"""Compute capabilities that this build has CUDA machine code for; empty in a build without nvcc."""

cuda_op_archs: dict[str, tuple[tuple[int, int], ...]]
"""CUDA op -> those of `cuda_archs` that it has machine code for."""

class Exchange:
    """How a type of arrays, like torch.Tensor, says what they are without a call into Python: the table of C functions
    that it carries as `__dlpack_c_exchange_api__` (DLPack 1.3). Raises TypeError for a type without one.
    """

    def __init__(self, type: type) -> None: ...
    def layouts(self, arrays: tuple[Any, ...]) -> bytes | None:
        """Equal for arrays that are equal in dtypes, devices, shapes and strides and, on a GPU, as far off a multiple
        of 16 bytes. None where DLPack has no words for one of them."""

class CudaLaunch:
    """A CUDA op on a device, bound to the types of its arrays, `(shape, dtype name)` each, and to its attributes.

    Raises ValueError for an unknown op or another number of arrays, TypeError for another dtype. None in a build
    without nvcc.
    """

    def __init__(
        self,
        exchange: Exchange,
        device: int,
        name: str,
        inputs: Sequence[tuple[Sequence[int], str]],
        outputs: Sequence[tuple[Sequence[int], str]],
        attrs: Sequence[int],
    ) -> None: ...
    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Launch on the stream that the arrays' framework works on. They are dense, of the types bound here, on that
        device, and start at multiples of 16 bytes: of all this nothing is looked at again.

        Releases the GIL, allocates nothing, waits for nothing. Raises RuntimeError if CUDA refuses the launch.
        """

def cuda_ffi_targets() -> dict[str, Any]:
    """Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="CUDA")`; as `ffi_targets`."""
