"""Programs of core_kernels/peer, prepared on a device once for all calls of the same sizes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import cpp_bindings
from ...core_kernels.launch import ArrayType
from ...core_kernels.peer.programs.program import Program
from ..ops.private import exchange

if TYPE_CHECKING:
    from .peer_memory import PeerMemory


class Prepared(NamedTuple):
    """A program on a device. results: the shapes and dtypes of its results."""

    program: Program
    launch: Any
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, program: Program, device: torch.device) -> "Prepared":
        types = [(array.shape, array.dtype) for array in program.arrays.values()]
        places = [program.places.get(name, -1) for name in program.arrays]
        assert exchange is not None
        launch = cpp_bindings.CudaProgram(exchange, device.index, types, places, program.steps)
        return cls(program, launch, tuple(_torch_type(program.arrays[name]) for name in program.results))

    def __call__(self, memory: "PeerMemory", given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The results by name."""
        program, device = self.program, memory.device
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results]
        results = dict(zip(program.results, tensors, strict=True))
        buffer = torch.empty(program.nbytes, dtype=torch.uint8, device=device)
        passed = given | results
        passed = tuple(passed[name] for name in program.arrays if name not in program.places)
        self.launch(passed, buffer, memory.side_stream)
        return results


def prepare(memory: "PeerMemory", key: tuple[Any, ...], write: Callable[[], Program]) -> Prepared:
    """The program of this key, which `write` writes for the first call with it."""
    if key not in memory.programs:
        memory.programs[key] = Prepared.of(write(), memory.device)
    return memory.programs[key]


def _torch_type(array: ArrayType) -> tuple[tuple[int, ...], torch.dtype]:
    return array.shape, getattr(torch, array.dtype)
