"""Memory of the GPUs of one host, a process each, that kernels of all of them write and read.

    counts     (E,) int32: of this rank, which all ranks read
    rows       of this rank, which the experts' ranks pull; and the slots that they push into (programs/writer.py)

    write own rows and counts | meet | programs, products | meet | sum slots        forward
    write own gradients       | meet | programs, products | meet | sum slots        backward

`meet` is a barrier in the stream, a kernel that signals every rank with release and waits for its signal with acquire,
both of system scope. A kernel's stores are complete when the kernel ends, before the signal; the loads of the next
kernel come after the wait. So what was written before a rank's barrier is seen after the barrier of any other.

A rank writes its rows and counts after its last barrier of the direction before, which every rank reaches after its
pulls. Peers write its slots after the first barrier, which it reaches after its sums.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.peer.programs.program import ALIGNMENT
from ..exchange.process_groups import compare_calls, key_of
from .symmetric import Shared, barrier, shared_memory


class MappedBuffer(NamedTuple):
    """Mapped memory. addresses (ranks, 2) int32: 64 bits of each rank's. starts: the first byte of the counts and of
    the rows, and the end. counts: each rank's, as the latest call has read them."""

    shared: Shared
    addresses: Tensor
    starts: tuple[int, ...]
    counts: list[Tensor]


class MappedMemory:
    """The memory of a group, allocated when a call needs more than any before, and what its ranks have compared.

    group: of at least two ranks. timeout_ms: of a barrier.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_ms: int) -> None:
        self.group, self.device, self.timeout_ms = group, device, timeout_ms
        self.rank, self.ranks = group.rank(), group.size()
        self.buffer: MappedBuffer | None = None
        self.of_graphs: list[MappedBuffer] = []
        self.compared: set[int] = set()
        self.interrupted = False

    @property
    def own(self) -> Tensor:
        """This rank's memory, uint8."""
        assert self.buffer is not None
        return self.buffer.shared.of_rank[self.rank]

    def barrier(self) -> None:
        """Work that the current stream gets from now on starts when all ranks have ended theirs before this call."""
        assert self.buffer is not None
        barrier(self.buffer.shared, self.timeout_ms)

    def share_counts(self, counts: Tensor) -> Tensor:
        """(ranks, E) int32: the counts (E,) of all ranks. Has the first barrier of a call."""
        assert self.buffer is not None
        of_rank = self.buffer.counts
        if not of_rank or of_rank[0].shape != counts.shape:
            of_rank[:] = [of[: 4 * len(counts)].view(torch.int32) for of in self.buffer.shared.of_rank]
        of_rank[self.rank].copy_(counts)
        self.barrier()
        return torch.stack(of_rank)

    def reserve(self, op: str, experts: int, nbytes: int, shared: Mapping[str, Any] | None) -> None:
        """Allocate, if there is less, memory for counts and for `nbytes` bytes of rows. shared: arguments that the
        ranks compare before they allocate; None if they have."""
        capturing = is_capturing()
        if self._lacks(experts, nbytes):
            if capturing:
                got, hint = "a call that needs more than any before, in a graph", "run the layer once at these sizes"
                fail(RuntimeError, op, "transport", got, hint=f"{hint} before the capture")
            if shared is not None:
                self.compare(op, shared)
            self.allocate(experts, nbytes)
        if capturing and self.buffer is not None and not any(buffer is self.buffer for buffer in self.of_graphs):
            self.of_graphs.append(self.buffer)  # the graph has its addresses

    def allocate(self, experts: int, nbytes: int) -> None:
        """Memory for counts, and for these bytes of rows. A collective if there is less."""
        if lacks := self._lacks(experts, nbytes):
            self._grow(*lacks)

    def _lacks(self, experts: int, nbytes: int) -> tuple[int, int] | None:
        """The bytes of counts and of rows for both this and what it has; None if it has enough."""
        of_counts = -(-4 * experts // ALIGNMENT) * ALIGNMENT
        _, start, end = (0, 0, 0) if self.buffer is None else self.buffer.starts
        both = max(of_counts, start), max(nbytes, end - start)
        return None if both == (start, end - start) else both

    def _grow(self, of_counts: int, of_rows: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # with the barrier: nobody uses the old memory any more
        dist.barrier(self.group)
        with self._on_device():
            shared = shared_memory(of_counts + of_rows, self.group)
        addresses = torch.tensor([of.data_ptr() for of in shared.of_rank], dtype=torch.int64, device=self.device)
        starts = 0, of_counts, of_counts + of_rows
        self.buffer = MappedBuffer(shared, addresses.view(torch.int32).view(-1, 2), starts, [])

    def is_new(self, shared: Mapping[str, Any]) -> bool:
        """Whether the ranks have not compared these arguments since the last error."""
        return key_of(shared) not in self.compared

    def compare(self, op: str, shared: Mapping[str, Any]) -> None:
        if self.interrupted and torch.cuda.is_available():
            torch.cuda.synchronize()  # with the comparison: nobody reads what the next call writes
        compare_calls(op, shared, self.group.group_name, None)
        self.compared.add(key_of(shared))
        self.interrupted = False

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Around the work between two barriers. After an error there the next call begins with a comparison on the
        host, where the ranks wait for each other: all have failed alike, or the time limit ends them."""
        try:
            yield
        except Exception:
            self.interrupt()
            raise

    def interrupt(self) -> None:
        self.interrupted = True
        self.compared.clear()

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
