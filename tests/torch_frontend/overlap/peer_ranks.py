"""Two ranks of PeerMemory on a CPU: kernels in Triton's interpreter, files as the memory of the ranks, Gloo as the
barrier; run by test_peer_memory.py."""

import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mxep.torch_frontend import PeerMemory
from mxep.torch_frontend.overlap import peer_memory
from mxep.torch_frontend.overlap.symmetric import Shared
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import conftest  # noqa: F401 -- Triton's interpreter without the work that has no effect
from . import ep_overlap, ep_peers, ep_rounds

INTERPRETER = True
MOST_TOKENS, BARRIERS = 12, 3
"""Of a direction; nobody uses a rank's memory when it has passed the first one."""


class Files:
    """What the ranks map. The operand is poisoned before a rank says that it is done with it, its rows to tokens when
    all are. One rank is late, at a barrier that changes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.opened: list[PeerMemory] = []
        self.barriers: dict[int, int] = {}

    def open(self, group: dist.ProcessGroup, rows: int | None, **options: Any) -> PeerMemory:
        self.opened.append(PeerMemory(group, rows, width=3, **options))
        return self.opened[-1]

    def shared_memory(self, nbytes: int, group: dist.ProcessGroup) -> Shared:
        self.number += 1
        mine = self.folder / f"memory{self.number}-{group.rank()}"
        mine.write_bytes(b"\xff" * nbytes)
        dist.barrier(group)
        names = [str(mine.with_name(f"memory{self.number}-{r}")) for r in range(group.size())]
        return Shared([torch.from_file(n, shared=True, size=nbytes, dtype=torch.uint8) for n in names], group)

    def interrupt(self, memory: PeerMemory) -> None:
        """After an error, or with new memory, the next barrier is the first one of a direction."""
        self.barriers[id(memory)] = -1

    def barrier(self, shared: Shared, timeout_ms: int) -> None:
        (memory,) = (m for m in self.opened if m.buffer is not None and m.buffer.shared is shared)
        assert memory.buffer is not None
        number = self.barriers[id(memory)] = self.barriers.get(id(memory), -1) + 1
        _, experts, tokens, end = memory.buffer.starts
        if number % 7 == memory.rank:
            time.sleep(0.01)  # the others may not go on
        if number % BARRIERS == 0:
            memory.own[experts:tokens] = 255
        dist.barrier(shared.handle)
        if number % BARRIERS == 0:
            memory.own[tokens:end] = 255


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


def ffn(run: str, *seeds: int, bias: bool = True) -> None:
    for seed in seeds:
        ep_overlap.ffn(memory(), run, range(seed, seed + 1), bias, most=MOST_TOKENS)
    memory().overflow()


def products(run: str, *seeds: int) -> None:
    for seed in seeds:
        ep_overlap.products(memory(), run, False, range(seed, seed + 1), MOST_TOKENS)


def begin(rank: int) -> None:
    peer_memory._missing = lambda: ""
    peer_memory._device = lambda: torch.device("cpu")
    peer_memory.shared_memory = files().shared_memory
    peer_memory.barrier = files().barrier
    interrupt = PeerMemory.interrupt
    PeerMemory.interrupt = lambda memory: (interrupt(memory), files().interrupt(memory))[0]  # type: ignore[method-assign]
    grow = PeerMemory._grow
    PeerMemory._grow = lambda memory, sizes: (grow(memory, sizes), files().interrupt(memory))[0]  # type: ignore[method-assign]
    np.seterr(all="ignore")


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    return {
        "routings": lambda: ffn("mxfp8", 0, 1, 2, 3, 4, 7, bias=False),
        "all transfers": lambda: ffn("mxfp8 in all transfers", 5),
        "no transfer": lambda: ffn("bf16 in all transfers", 5),
        "bf16": lambda: ffn("bf16", 4),
        "folded": lambda: ffn("mxfp8 folded", 5),
        "rows": lambda: products("mxfp8_wgrad_with_hp", 4),
        "rows in all transfers": lambda: products("mxfp8 in all transfers", 5),
        **ep_peers.checks(world, opened),
        **ep_rounds.checks(False, opened),
    }
