"""The ranks of tests/gpu/exchange/one_gpu.py on a CPU: programs by program_on_cpu.py; run by test_one_process.py."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from mxep.torch_frontend.overlap import prepared
from torch import Tensor

from ...gpu.exchange import one_gpu
from .program_on_cpu import ProgramOnCPU

opened: list[one_gpu.Mapped] = []


def begin(rank: int) -> None:
    real = one_gpu.map_memory

    def map_memory(*arguments: Any) -> list[one_gpu.Mapped]:
        opened[:] = real(*arguments)
        return opened

    def memory_of(side: int) -> list[Tensor]:
        assert opened[0].mapped.buffer is not None
        return opened[0].mapped.buffer.shared.of_rank

    def program(exchange: object, index: object, types: Any, places: Any, steps: Any) -> ProgramOnCPU:
        return ProgramOnCPU(types, places, steps, memory_of, rank)

    one_gpu.map_memory = map_memory
    prepared.cpp_bindings = SimpleNamespace(CudaProgram=program)
    np.seterr(all="ignore")


def fails(fault: str) -> None:
    try:
        one_gpu.main("kernels" if fault in one_gpu.WITHOUT_OVERLAP else "driven", fault)
    except (AssertionError, ValueError, IndexError):
        return
    raise RuntimeError(f"{fault} has no error")


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    return {
        **{part: partial(one_gpu.main, part) for part in one_gpu.PARTS},
        **{f"fault in {name}": partial(fails, name) for name in one_gpu.FAULTS},
    }
