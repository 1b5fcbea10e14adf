from collections.abc import Sequence
from typing import Any

def run(
    name: str, inputs: Sequence[Any], outputs: Sequence[Any], attrs: Sequence[int], num_threads: int | None = None
) -> None:
    """Run a C++ op on CPU arrays; it writes every byte of the outputs, without the GIL.

    Args:
        name: of the op.
        inputs: arrays with `__dlpack__`, in the order of `KernelOp.inputs`.
        outputs: arrays with `__dlpack__`, of the types of `Signature.out`.
        attrs: the values of `Signature.attrs`.
        num_threads: threads that this call may use, at least 1; None: `num_threads()`.

    Raises:
        ValueError: an unknown op, a strided array, an array on another device. Data that break the op's contract, such
            as a row map that points outside its input.
        TypeError: another dtype.

    Example:
        >>> import numpy as np
        >>> q, sf = np.empty((1, 32), np.uint8), np.empty((1, 1), np.uint8)
        >>> run("quantize_row", [np.full((1, 32), 448, np.float32)], [q, sf], [0, 0])
        >>> int(q[0, 0]), int(sf[0, 0])
        (126, 127)
    """

def ffi_targets() -> dict[str, Any]:
    """The C++ ops as calls of XLA on a CPU.

    A call takes one attribute, `attrs`, a numpy int64 array. XLA reports its errors as INVALID_ARGUMENT.

    Returns:
        Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="cpu")`.
    """

def num_threads() -> int:
    """Threads that an op may use without `num_threads`, as in calls from XLA.

    Returns:
        The threads of OpenMP (OMP_NUM_THREADS, or all cores) when the module was loaded; one in the child of a
        later fork. A child that loads the module itself hangs in OpenMP if its parent has used it.
    """

def peer_ffi_targets() -> dict[str, Any]:
    """The ops on rows in the memory of the GPUs of a group, as calls of XLA.

    Inputs: this device's rows, the map, its rank (1,) int32 (core_kernels/peer/peers.h). A call takes one attribute,
    `group`, a numpy int64: the number of a `PeerGroup`. Its GPUs wait for each other, and the host for nothing.

    Returns:
        Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="CUDA")`.
    """

MOST_PEERS: int
"""The most ranks of a `PeerGroup`; 0 in a build without nvcc."""

SIGNAL_PAD_BYTES: int
"""Bytes of a GPU, zeros at first, in which the ranks of a `PeerGroup` signal each other."""

def peer_region(address: int) -> tuple[int, int, int]:
    """The allocation with an address of GPU memory, for other processes of the host.

    Args:
        address: in memory of the driver's virtual memory management, as XLA allocates it.

    Returns:
        The first address, bytes, and a file descriptor, which the caller closes.

    Raises:
        RuntimeError: CUDA cannot share the memory.
    """

class MappedRegion:
    """Memory of a GPU of another process, mapped as long as the object lives.

    Args:
        descriptor: of `peer_region` of the other process.
        nbytes: likewise.
        devices: the numbers of the GPUs whose kernels use it.

    Raises:
        RuntimeError: CUDA cannot map the memory.
    """

    def __init__(self, descriptor: int, nbytes: int, devices: Sequence[int]) -> None: ...
    @property
    def address(self) -> int:
        """The first address in this process."""

class PeerGroup:
    """The GPUs of groups of ranks, of which this process has some (core_kernels/peer/group/group.h). A build without
    nvcc has none.

    Args:
        number: by which calls of `peer_ffi_targets` find the groups, while the object lives.
        members: of this process: (number of the GPU, rank, address of each rank's signal pad, what is added to an
            address of each rank's process, number of each rank's GPU here or -1, (first address, bytes) of the memory
            that all ranks map; 0 bytes for all).
        limit_ms: the milliseconds after which a rank that waits ends with an error.
        memory: what holds the signal pads and the maps; kept until the group has waited for its kernels and is gone.

    Raises:
        ValueError: Too many ranks.
        RuntimeError: A GPU cannot read the memory of another.
    """

    def __init__(
        self,
        number: int,
        members: Sequence[tuple[int, int, Sequence[int], Sequence[int], Sequence[int], tuple[int, int]]],
        limit_ms: int,
        memory: Any,
    ) -> None: ...
    def test(self) -> None:
        """One meeting of all ranks, without the GIL; every process calls it.

        Raises:
            RuntimeError: A rank did not come.
        """

cuda_archs: tuple[tuple[int, int], ...]
"""Compute capabilities that this build has CUDA machine code for; empty in a build without nvcc."""

cuda_op_archs: dict[str, tuple[tuple[int, int], ...]]
"""CUDA op -> the compute capabilities of `cuda_archs` that it has machine code for."""

class Exchange:
    """Reads arrays of a type, like torch.Tensor, without a call into Python.

    It uses the table of C functions in `__dlpack_c_exchange_api__` of the type (DLPack 1.3).

    Args:
        type: of the arrays.

    Raises:
        TypeError: a type without that table.
    """

    def __init__(self, type: type) -> None: ...
    def layouts(self, arrays: tuple[Any, ...]) -> bytes | None:
        """A key: equal for arrays with equal dtypes, devices, shapes and strides and, on a GPU, equal addresses modulo
        16
        bytes.

        Args:
            arrays: of the type.

        Returns:
            The key; None where DLPack has no type for one of the arrays.
        """

class CudaLaunch:
    """A CUDA op for one device. A build without nvcc has no ops.

    Args:
        exchange: of the type of the arrays.
        device: the number of the GPU.
        name: of the op.
        inputs: (shape, dtype name) of each input.
        outputs: (shape, dtype name) of each output and of the scratch memory.
        attrs: `Launch.cuda_attrs`.

    Raises:
        ValueError: an unknown op or another number of arrays.
        TypeError: another dtype.
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
        """Launch on the current stream of the arrays' framework, without the GIL. It allocates nothing and does not
        wait.

        The caller guarantees that the arrays are dense, of these types, on this device, and start at multiples of 16
        bytes; nothing here checks that again.

        Args:
            inputs: the arrays.
            outputs: the outputs and the scratch memory.

        Raises:
            RuntimeError: CUDA refuses the launch.
        """

class CudaProgram:
    """Steps on two streams of one device, launched by one call (core_kernels/peer/program.h).

    Args:
        exchange: of the type of the arrays.
        device: the number of the GPU.
        types: (shape, dtype name) of each array.
        places: the offset of each array in the buffer of a call; -1 for an array that a call passes.
        steps: (op, stream, inputs, outputs, attrs, (first, last, reserved)), arrays by number; `Step` of schedule.py.

    Raises:
        ValueError: an unknown op, another number of arrays.
        TypeError: another dtype.
    """

    def __init__(
        self,
        exchange: Exchange,
        device: int,
        types: Sequence[tuple[Sequence[int], str]],
        places: Sequence[int],
        steps: Sequence[tuple[str, int, Sequence[int], Sequence[int], Sequence[int], tuple[int, int, int]]],
    ) -> None: ...
    def __call__(self, passed: tuple[Any, ...], buffer: Any, side: int) -> None:
        """Launch on the current stream of the arrays' framework and on the stream `side`. As `CudaLaunch.__call__`.

        Args:
            passed: dense arrays of the types without a place, in their order.
            buffer: a dense array of bytes, in which the others are.
            side: the address of a stream of the device.

        Raises:
            RuntimeError: CUDA refuses a launch.
        """

def cuda_ffi_targets() -> dict[str, Any]:
    """The CUDA ops as calls of XLA, as `ffi_targets`.

    Returns:
        Op name -> capsule for `jax.ffi.register_ffi_target(name, capsule, platform="CUDA")`.
    """
