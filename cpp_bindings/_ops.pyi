from collections.abc import Sequence
from typing import Any

def run(
    name: str, inputs: Sequence[Any], outputs: Sequence[Any], attrs: Sequence[int], num_threads: int | None = None
) -> None:
    """Run a C++ op on CPU arrays with `__dlpack__`; writes every byte of `outputs`.

    num_threads: threads that this call may use, at least 1; None: `num_threads()`. The child of a fork has one.

    Releases the GIL. Raises ValueError when the data break the op's contract (a row map that points outside
    its input), for an unknown op, a strided array or one on another device; TypeError for another dtype.
    """

def ffi_targets() -> dict[str, Any]:
    """Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="cpu")`.

    The call takes one attribute, `attrs`, a numpy int64 array. Errors arrive as XLA's INVALID_ARGUMENT.
    """

def num_threads() -> int:
    """Threads that an op may use without `num_threads`, as in calls from XLA: those of OpenMP (OMP_NUM_THREADS, or all
    cores) when the module was loaded; one in the child of a fork."""

def peer_ffi_targets() -> dict[str, Any]:
    """Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="CUDA")`: the op on rows that lie on
    several GPUs of one process.

    Inputs: this device's rows, the map, place (2,) int32 (core_kernels/peer/peers.h). The call takes one attribute,
    `devices`, a numpy int64: the devices of the program. The call waits until all of them have come to it.
    """

cuda_archs: tuple[tuple[int, int], ...]
"""Compute capabilities that this build has CUDA machine code for; empty in a build without nvcc."""

cuda_op_archs: dict[str, tuple[tuple[int, int], ...]]
"""CUDA op -> the compute capabilities of `cuda_archs` that it has machine code for."""

class Exchange:
    """Reads arrays of a type, like torch.Tensor, without a call into Python: through the table of C functions in its
    `__dlpack_c_exchange_api__` (DLPack 1.3). Raises TypeError for a type without that table.
    """

    def __init__(self, type: type) -> None: ...
    def layouts(self, arrays: tuple[Any, ...]) -> bytes | None:
        """A key: equal for arrays with equal dtypes, devices, shapes and strides and, on a GPU, equal addresses modulo
        16 bytes. None where DLPack has no type for one of the arrays."""

class CudaLaunch:
    """A CUDA op for one device, the types of its arrays, `(shape, dtype name)` each, and its attributes.

    outputs: with the scratch memory of the launch. attrs: `Launch.cuda_attrs`.

    Raises ValueError for an unknown op or another number of arrays, TypeError for another dtype. A build without nvcc
    has no ops.
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
        """Launch on the current stream of the arrays' framework. The caller guarantees that the arrays are dense, of
        these types, on this device, and start at multiples of 16 bytes; nothing here checks that again.

        Releases the GIL, allocates nothing, does not wait. Raises RuntimeError if CUDA refuses the launch.
        """

def cuda_ffi_targets() -> dict[str, Any]:
    """Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="CUDA")`; as `ffi_targets`."""
