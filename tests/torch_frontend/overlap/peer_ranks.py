"""Ranks of PeerMemory on a CPU: programs by program_on_cpu.py, files as the memory of the ranks, Gloo as the barrier;
run by test_peer_memory.py. device_ranks.py has the calls that overlap."""

import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mxep.core_kernels.peer.programs.writer import Memory
from mxep.torch_frontend import PeerMemory
from mxep.torch_frontend.overlap import mapped_memory, peer_memory, prepared
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_mm
from mxep.torch_frontend.overlap.mapped_memory import MappedMemory
from mxep.torch_frontend.overlap.rank_rows import RankRows
from mxep.torch_frontend.overlap.rows import Rows
from mxep.torch_frontend.overlap.symmetric import Shared
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import ep_overlap, ep_peers, ep_rounds
from .program_on_cpu import ProgramOnCPU

MOST_TOKENS = 12
POISON = 0x7F
"""Large values in bf16 and fp32: a slot that is NaN was made NaN on purpose."""


class Files:
    """What the ranks map. One rank is late, after a barrier that changes. The slots are poisoned before a rank says
    that peers may write them, the rows that peers read after a direction."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.opened: list[PeerMemory] = []
        self.barriers: dict[int, int] = {}
        self.places: dict[int, Memory] = {}
        self.starts: set[int] = set()

    def open(self, group: dist.ProcessGroup, rows: int | None, **options: Any) -> PeerMemory:
        self.opened.append(PeerMemory(group, rows, **options))
        return self.opened[-1]

    def shared_memory(self, nbytes: int, group: dist.ProcessGroup) -> Shared:
        self.number += 1
        mine = self.folder / f"memory{self.number}-{group.rank()}"
        mine.write_bytes(b"\xff" * nbytes)
        dist.barrier(group)
        names = [str(mine.with_name(f"memory{self.number}-{r}")) for r in range(group.size())]
        return Shared([torch.from_file(n, shared=True, size=nbytes, dtype=torch.uint8) for n in names], group)

    def note(self, rows: RankRows) -> None:
        """These are the places of the direction that begins."""
        self.places[id(rows.memory.mapped)] = rows.places

    @contextmanager
    def direction(self, mapped: MappedMemory) -> Iterator[None]:
        """Around the work of a rank in one direction of a call."""
        self.starts.add(id(mapped))
        with UNINTERRUPTED(mapped):
            yield
        if places := self.places.get(id(mapped)):
            mapped.own[places.rows : places.slots] = 255

    def barrier(self, shared: Shared, timeout_ms: int) -> None:
        (mapped,) = (m.mapped for m in self.opened if m.mapped.buffer is not None and m.mapped.buffer.shared is shared)
        if id(mapped) in self.starts and (places := self.places.get(id(mapped))):
            mapped.own[places.slots : places.end] = POISON
        self.starts.discard(id(mapped))
        dist.barrier(shared.handle)
        number = self.barriers[id(mapped)] = self.barriers.get(id(mapped), -1) + 1
        if number % 3 == mapped.rank:
            time.sleep(0.02)  # the others may go on, but not beyond the next barrier


UNINTERRUPTED = MappedMemory.uninterrupted
MISSING = peer_memory._missing
WRITE = RankRows.write
EMPTY = torch.empty


@cache
def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@cache
def files() -> Files:
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    return Files(Path(folder[0]))


def opened(rows: int | None, **options: Any) -> PeerMemory:
    return files().open(world().get_group(), rows, **options)


@cache
def memory() -> PeerMemory:
    return opened(MOST_TOKENS * ep_overlap.TOP_K * dist.get_world_size())


def memory_of(side: int) -> list[Tensor]:
    (memory,) = (m for m in files().opened if id(m) == side)
    assert memory.mapped.buffer is not None
    return memory.mapped.buffer.shared.of_rank


def write(rows: RankRows, x: Tensor, of: Rows) -> None:
    files().note(rows)
    WRITE(rows, x, of)


def poisoned(*shape: object, **options: object) -> Tensor:
    """In place of torch.empty, for all that a program allocates."""
    out = EMPTY(*shape, **options)  # type: ignore[arg-type]
    out.view(torch.uint8).fill_(255)
    return out


def begin(rank: int) -> None:
    peer_memory._missing = lambda group=None: ""
    peer_memory._device = lambda: torch.device("cpu")
    mapped_memory.shared_memory = files().shared_memory
    mapped_memory.barrier = files().barrier
    MappedMemory.uninterrupted = lambda mapped: files().direction(mapped)  # type: ignore[method-assign]
    RankRows.write = write  # type: ignore[method-assign]
    PeerMemory.side_stream = property(id)  # type: ignore[method-assign, assignment]

    def program(exchange: object, index: object, *arguments: Any) -> ProgramOnCPU:
        return ProgramOnCPU(*arguments, memory_of, rank)

    prepared.cpp_bindings = SimpleNamespace(CudaProgram=program)
    prepared.torch = SimpleNamespace(**{**vars(torch), "empty": poisoned})
    np.seterr(all="ignore")


def ffn(run: str, *seeds: int, bias: bool = True) -> None:
    for seed in seeds:
        ep_overlap.ffn(memory(), run, range(seed, seed + 1), bias, most=MOST_TOKENS)
    memory().overflow()


def products(run: str, replicas: bool, *seeds: int) -> None:
    for seed in seeds:
        ep_overlap.products(memory(), run, replicas, range(seed, seed + 1), MOST_TOKENS)


def chosen(**patches: Callable[..., str]) -> tuple[PeerMemory | None, str]:
    """PeerMemory.choose and what it logs, where ranks have other hosts and lack something else."""
    said: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("mxep")
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    places = {"host": (socket, "gethostname"), "missing": (peer_memory, "_missing")}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, function in patches.items():
                patch.setattr(*places[name], function)
            found = PeerMemory.choose(world().get_group(), on_overflow="nan")
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    (sentence,) = said
    return found, sentence


def choose() -> None:
    """All ranks have the same answer, whichever of them lacks something."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found, said = chosen()
    assert found is not None
    assert (found.on_overflow, found.ranks) == ("nan", ranks)
    assert said == f"INFO PeerMemory.choose: experts get their rows through PeerMemory of {ranks} GPUs"
    by_all_to_all = "experts get their rows by all-to-all"
    last = ranks - 1
    for patches, reason in (
        ({"host": lambda: "b" if rank == last else "a"}, "ranks on a, b"),
        ({"missing": lambda group: "no nvcc" if rank == last else ""}, f"rank {last} has no nvcc"),
        ({"missing": MISSING}, "rank 0 has no CUDA"),
    ):
        found, said = chosen(**patches)
        assert found is None
        assert said == f"INFO PeerMemory.choose: {reason}: {by_all_to_all}"


RECIPES = [run for run in ep_overlap.RUNS if run not in ("mxfp8", "mxfp8 folded")]
"""With biases, which no program that overlaps takes."""


def counts_of_one_byte() -> None:
    """More rows than the memory of the call before: without a sign, counts of no row were taken for many."""
    group, over = world().get_group(), opened(None)
    w = torch.stack([torch.full((32, 32), i / 8) for i in range(2)])
    for rows in (10, 250):
        counts = torch.full((2 * group.size(),), rows, dtype=torch.uint8)
        x = torch.randn(rows * len(counts), 32, generator=torch.Generator().manual_seed(rows))
        found = expert_parallel_mm(x, w, counts, group=group, transport=over)
        assert torch.equal(found, expert_parallel_mm(x, w, counts.int(), group=group)), rows


def memory_of_other_ranks() -> None:
    """Rows went to the ranks of the memory's group."""
    others = dist.new_group(list(range(dist.get_world_size())))
    w, counts = torch.ones(1, 32, 32), torch.ones(dist.get_world_size(), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expert_parallel_mm: transport: got one of group '.*'; allowed: one of '"):
        expert_parallel_mm(torch.ones(len(counts), 32), w, counts, group=others, transport=memory())


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    return {
        "choose": choose,
        "counts of one byte": counts_of_one_byte,
        "memory of other ranks": memory_of_other_ranks,
        "routings": lambda: ffn("mxfp8", 0, 1, 2, 3, 4, 7, bias=False),
        "folded": lambda: ffn("mxfp8 folded", 5),
        **{f"recipe {run}": lambda run=run: ffn(run, 4, 5) for run in RECIPES},
        "rows": lambda: products("mxfp8_wgrad_with_hp", False, 4),
        "rows in all transfers": lambda: products("mxfp8 in all transfers", False, 5),
        "replicas": lambda: products("bf16", True, 5),
        **ep_peers.checks(world, opened),
        **ep_rounds.checks(False, opened),
    }
