"""Rows are exchanged by the sends and receives of a process group, a batch per chunk."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.policy.exchange import Move, Step
from ..exchange.counts import Request, send_error_sentinel
from ..exchange.process_groups import raise_collective_error
from ..exchange.shards import Ranks
from ..ops.checks import check_int
from ..ops.private import hide_from_modes
from .planned_exchange import PlannedExchange
from .symmetric import copy_each
from .transport import CHUNK_BYTES, Part, Transfer, Where, allocate_received, allocate_rows, find_group


class Collectives:
    """Rows are exchanged by the sends and receives of a process group, a batch per chunk: NCCL on GPUs, within a host
    and between hosts; Gloo on a CPU.

    Args:
        group: a process group or its name; None is the default group. A batch runs on the group's own stream, after the
            work that the current stream has when `send` is called. NCCL runs a batch on SMs, overlapped with the
            products.
        chunk_bytes: the rows that a rank receives in a layer are divided into at most eight chunks, of about so many
            bytes each; the same on all ranks. A chunk costs the host some tens of microseconds.

    Raises:
        ValueError: no process group, chunk_bytes below 1.
        TypeError: arguments of another type.

    Example:
        >>> def overlapped(rows, counts, w1, w3, w2):  # under torchrun, on GPUs or CPUs
        ...     return expert_parallel_ffn(rows, counts, w1, w3, w2, transport=Collectives())
    """

    def __init__(self, group: "str | dist.ProcessGroup | None" = None, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.group = find_group("Collectives", group)
        check_int("Collectives", "chunk_bytes", chunk_bytes, 1)
        self.chunk_bytes, self.weighs_sums = chunk_bytes, True

    @property
    def config_key(self) -> str:
        return f"{type(self).__name__}(chunk_bytes={self.chunk_bytes})"

    def begin(self, request: Request, width: int) -> PlannedExchange:
        return PlannedExchange(self, request)

    def on_device(self, request: Request, found: object) -> None:
        return None

    def send_error_sentinel(self, ranks: Ranks) -> None:
        send_error_sentinel(ranks)

    def outgoing(self, where: Where, rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, ...]:
        return allocate_rows(rows, parts, device)

    def open_transfer(
        self, where: Where, steps: Sequence[Step], sent: Sequence[int], received: Sequence[int],
        outgoing: tuple[Tensor, ...],
    ) -> "_Batches":  # fmt: skip
        return _Batches(self.group, where, steps, outgoing, allocate_received(outgoing, received[self.group.rank()]))


class _Batches:
    def __init__(
        self, group: dist.ProcessGroup, where: Where, steps: Sequence[Step], outgoing: tuple[Tensor, ...],
        received: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        self.group, self.rank, self.where, self.steps = group, group.rank(), where, steps
        self.outgoing, self.received = outgoing, received
        self.under_way: dict[int, tuple[list[dist.Work], list[dist.P2POp]]] = {}

    def send(self, chunks: range) -> None:
        for chunk in chunks:
            self._send(self.steps[chunk], chunk)
        for chunk in chunks:
            copy_own(self.steps[chunk], self.rank, self)

    def _send(self, step: Step, chunk: int) -> None:
        batch = []
        for source, destination in zip(self.outgoing, self.received, strict=True):
            for m in between_ranks(step.sends, self.rank):
                rows = source.narrow(0, m.source, m.rows)
                batch.append(dist.P2POp(dist.isend, rows, group=self.group, group_peer=m.peer))
            for m in between_ranks(step.receives, self.rank):
                rows = destination.narrow(0, m.destination, m.rows)
                batch.append(dist.P2POp(dist.irecv, rows, group=self.group, group_peer=m.peer))
        # torch refuses an empty batch. NCCL's communicator exists, since the counts came over it. A policy of selective
        # checkpointing could save these ops, but not the rows that they write: the backward would wait for no rows.
        with self._named(chunk, batch), hide_from_modes():
            self.under_way[chunk] = dist.batch_isend_irecv(batch) if batch else [], batch

    def wait(self, chunk: int) -> None:
        works, batch = self.under_way.pop(chunk)
        for i, work in enumerate(works):  # one per send and receive, or with NCCL one of all
            with self._named(chunk, batch[i : i + 1] if len(works) == len(batch) else batch):
                work.wait()

    def abandon(self) -> None:
        # Works that nobody has waited for break the process group when they are freed.
        with suppress(RuntimeError):
            for chunk in list(self.under_way):
                self.wait(chunk)

    @contextmanager
    def _named(self, chunk: int, batch: Sequence[dist.P2POp]) -> Iterator[None]:
        """Errors of a process group name neither the rank nor the sent rows."""
        try:
            yield
        except RuntimeError as error:
            ranks = " or ".join(map(str, sorted({op.peer for op in batch})))
            raise_collective_error(
                "Collectives", f"rank {ranks}", f"an error in chunk {chunk} of the rows to {self.where}: {error}"
            )


def copy_own(step: Step, rank: int, transfer: Transfer) -> None:
    """Copy the rows that this rank sends to itself."""
    own = [move for move in step.sends if move.peer == rank and move.rows]
    for source, destination in zip(transfer.outgoing, transfer.received, strict=True) if own else ():
        pairs = [(destination.narrow(0, m.destination, m.rows), source.narrow(0, m.source, m.rows)) for m in own]
        copy_each(*map(list, zip(*map(_in_words, pairs), strict=True)))


def _in_words(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The same bytes as words of 8 bytes, where addresses and size allow: copied byte by byte they reach half of the
    memory's bandwidth."""
    word = torch.int64 if all((t.data_ptr() | t.nbytes) % 8 == 0 for t in pair) else torch.uint8
    return [t.view(-1).view(word) for t in pair]


def between_ranks(moves: Sequence[Move], rank: int) -> list[Move]:
    """The moves of rows to or from another rank."""
    return [move for move in moves if move.peer != rank and move.rows]
