"""Ranks of PeerMemory on a CPU whose exchange the device would drive: its programs by program_on_cpu.py, files as the
memory of the ranks, Gloo as the barrier; run by test_device_exchange.py."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mxep.core_kernels.peer.programs import ffn
from mxep.core_kernels.peer.programs.writer import Memory
from mxep.torch_frontend import PeerMemory
from mxep.torch_frontend.overlap import device_call, device_exchange, peer_memory
from mxep.torch_frontend.overlap.symmetric import Shared
from torch import Tensor

from . import ep_device, ep_device_mm, ep_rounds, peer_ranks
from .program_on_cpu import ProgramOnCPU

INTERPRETER = True


class Files(peer_ranks.Files):
    """One rank is late, after a barrier that changes. The slots are poisoned before a rank says that peers may write
    them, the rows that peers read after a direction. mixed: memory of calls that the device drives and of others, which
    is not poisoned."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mixed: list[PeerMemory] = []
        self.starts: set[int] = set()

    @contextmanager
    def direction(self, memory: PeerMemory) -> Iterator[None]:
        """Around the work of a rank in one direction of a call."""
        self.starts.add(id(memory))
        with UNINTERRUPTED(memory):
            yield
        if places := self.places(memory):
            memory.own[places.rows : places.slots] = 255

    def barrier(self, shared: Shared, timeout_ms: int) -> None:
        (memory,) = (m for m in self.opened if m.buffer is not None and m.buffer.shared is shared)
        if id(memory) in self.starts and (places := self.places(memory)):
            memory.own[places.slots : places.end] = 255
        self.starts.discard(id(memory))
        dist.barrier(shared.handle)
        number = self.barriers[id(memory)] = self.barriers.get(id(memory), -1) + 1
        if number % 3 == memory.rank:
            time.sleep(0.02)  # the others may go on, but not beyond the next barrier

    def places(self, memory: PeerMemory) -> Memory | None:
        return None if memory in self.mixed or not memory.programs else next(reversed(memory.programs))[3]


UNINTERRUPTED = PeerMemory.uninterrupted


@cache
def files() -> Files:
    return Files(peer_ranks.files().folder)


def opened(rows: int | None, **options: Any) -> PeerMemory:
    return files().open(peer_ranks.world().get_group(), rows, **options)


def mix() -> PeerMemory:
    files().mixed.append(opened(None))
    return files().mixed[-1]


def memory_of(side: int) -> list[Tensor]:
    (memory,) = (m for m in files().opened if id(m) == side)
    assert memory.buffer is not None
    return memory.buffer.shared.of_rank


def poisoned(*shape: object, **options: object) -> Tensor:
    """In place of torch.empty, for all that a call allocates."""
    out = EMPTY(*shape, **options)  # type: ignore[arg-type]
    out.view(torch.uint8).fill_(255)
    return out


EMPTY = torch.empty


def begin(rank: int) -> None:
    peer_ranks.begin(rank)
    peer_memory.shared_memory = files().shared_memory
    peer_memory.barrier = files().barrier
    PeerMemory.uninterrupted = lambda memory: files().direction(memory)  # type: ignore[method-assign]
    device_exchange.runs_on = lambda device: True
    ffn.takes_ffn = lambda *sizes: True

    def program(exchange: object, index: object, *arguments: Any) -> ProgramOnCPU:
        return ProgramOnCPU(*arguments, memory_of, rank)

    device_call.cpp_bindings = SimpleNamespace(CudaProgram=program)
    PeerMemory.side_stream = property(id)  # type: ignore[method-assign, assignment]
    device_call.torch = SimpleNamespace(**{**vars(torch), "empty": poisoned})
    ep_device.count_runs()


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    of = peer_ranks.world, opened, mix
    return ep_device.checks(*of) | ep_device_mm.checks(*of) | ep_rounds.checks(True, opened)
