"""How the rows of an exchange travel: the protocol of arrivals, and collectives of a process group.

    outgoing = transport.outgoing(...)      memory for the rows of this rank that leave
    leg = transport.leg(..., outgoing)      leg.received: memory for the rows that arrive
    leg.send(range(c, d))                   rows of chunks leave as soon as the current stream has written them
    leg.wait(c)                             the current stream goes on when chunk c of leg.received is there
    leg.abandon()                           after an error: the next leg can be opened

All ranks open the same legs in the same order and send their chunks in the same order. `core_kernels/exchange.py` says
which rows go where; every transport writes the same bytes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..core_kernels.exchange import Move, Step
from ..core_kernels.launch import fail
from ._checks import check_int
from ._ranks import name_of, no_answer
from ._torch_private import group_named
from .symmetric import copy_each

Where = Literal["experts", "tokens"]
CHUNK_BYTES = 2**26
TIMEOUT = timedelta(minutes=10)
ALIGNMENT = 256
"""Bytes: each part in a box begins at a multiple."""


class Part(NamedTuple):
    """One of the arrays that travel together: the values of a row and their dtype."""

    width: int
    dtype: torch.dtype


class Leg(Protocol):
    """The rows of one exchange in one direction. outgoing, received: a tensor per part; rows of `received` that no rank
    fills are uninitialized."""

    outgoing: tuple[Tensor, ...]
    received: tuple[Tensor, ...]

    def send(self, chunks: range) -> None: ...
    def wait(self, chunk: int) -> None: ...
    def abandon(self) -> None:
        """End the leg after an error: chunks that were not sent never are, and nobody waits for them. If all ranks fail
        at the same chunk, the transport can open the next leg. Raises nothing of its own."""
        ...


class Transport(Protocol):
    """Opens legs between the ranks of `group`. chunk_bytes: a chunk of experts has about so many bytes of rows, so that
    the device works on it longer than the host prepares it."""

    group: dist.ProcessGroup
    chunk_bytes: int

    def outgoing(self, where: Where, rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, ...]:
        """Uninitialized memory for the rows of the next leg to the experts' operands or to the tokens, from which they
        leave without a copy. The current stream may write to it after this call."""
        ...

    def leg(
        self, where: Where, steps: Sequence[Step], sent: Sequence[int], received: Sequence[int],
        outgoing: tuple[Tensor, ...],
    ) -> Leg:  # fmt: skip
        """A leg to the experts' operands or to the tokens. steps: of the chunks. sent, received: rows of each rank.
        outgoing: the rows of this rank; of `outgoing`, or any other tensors."""
        ...


def described(transport: Transport) -> str:
    """What the ranks must agree on."""
    return f"{type(transport).__name__}(chunk_bytes={transport.chunk_bytes})"


def group_of(op: str, group: "str | dist.ProcessGroup | None") -> dist.ProcessGroup:
    """The process group; raises TypeError and ValueError if there is none."""
    name = name_of(op, "group", group)
    if not name:
        fail(ValueError, op, "group", repr(group), "allowed: a process group; call init_process_group before")
    return group_named(name)


def milliseconds(op: str, timeout: timedelta) -> int:
    """The limit of a wait on a GPU; raises ValueError unless it is a timedelta of a millisecond or more."""
    if not isinstance(timeout, timedelta) or timeout < timedelta(milliseconds=1):
        fail(ValueError, op, "timeout", repr(timeout), "allowed: a timedelta of a millisecond or more")
    return int(timeout / timedelta(milliseconds=1))


def copy_own(step: Step, rank: int, leg: Leg) -> None:
    """Copy the rows that stay on this rank."""
    own = [move for move in step.sends if move.peer == rank and move.rows]
    for source, destination in zip(leg.outgoing, leg.received, strict=True) if own else ():
        pairs = [(destination.narrow(0, m.destination, m.rows), source.narrow(0, m.source, m.rows)) for m in own]
        copy_each(*map(list, zip(*map(_in_words, pairs), strict=True)))


def _in_words(pair: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The same bytes as words of 8 bytes, where addresses and size allow: copied byte by byte they reach half of the
    memory's bandwidth."""
    word = torch.int64 if all((t.data_ptr() | t.nbytes) % 8 == 0 for t in pair) else torch.uint8
    return [t.view(-1).view(word) for t in pair]


def between_ranks(moves: Sequence[Move], rank: int) -> list[Move]:
    """The moves of rows that travel."""
    return [move for move in moves if move.peer != rank and move.rows]


class Collectives:
    """Rows travel by the sends and receives of a process group, a batch per chunk: NCCL on GPUs, within a host and
    between hosts; Gloo on a CPU.

    group: a process group or its name; None is the default group. The group's own stream carries a batch, behind the
    work that the current stream has when `send` is called. NCCL runs it on multiprocessors, beside the products.
    chunk_bytes: the rows of a layer that arrive on a rank are divided into at most eight chunks, of about so many bytes
    each; the same on all ranks. A chunk costs the host some tens of microseconds.
    """

    def __init__(self, group: "str | dist.ProcessGroup | None" = None, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.group = group_of("Collectives", group)
        check_int("Collectives", "chunk_bytes", chunk_bytes, 1)
        self.chunk_bytes = chunk_bytes

    def outgoing(self, where: Where, rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, ...]:
        return rows_of_parts(rows, parts, device)

    def leg(
        self, where: Where, steps: Sequence[Step], sent: Sequence[int], received: Sequence[int],
        outgoing: tuple[Tensor, ...],
    ) -> "_Batches":  # fmt: skip
        return _Batches(self.group, where, steps, outgoing, arriving(outgoing, received[self.group.rank()]))


def rows_of_parts(rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, ...]:
    """Uninitialized rows."""
    return tuple(torch.empty((rows, part.width), dtype=part.dtype, device=device) for part in parts)


def arriving(outgoing: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    """Uninitialized memory for `rows` rows of the parts that leave."""
    return tuple(part.new_empty((rows, part.shape[1])) for part in outgoing)


def places_of(rows: Sequence[int], parts: Sequence[Part]) -> list[int]:
    """The first byte of each part in a box of at most so many rows, and the end of the last one."""
    sizes = [-(-max(rows) * part.width * part.dtype.itemsize // ALIGNMENT) * ALIGNMENT for part in parts]
    return list(accumulate(sizes, initial=0))


def views_of(memory: Tensor, rows: int, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """The parts of a box of `rows` rows."""
    sizes = [rows * part.width * part.dtype.itemsize for part in parts]
    return tuple(
        memory[at : at + nbytes].view(part.dtype).view(rows, part.width)
        for at, nbytes, part in zip(places_of([rows], parts), sizes, parts, strict=False)
    )


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
        # torch refuses an empty batch. NCCL's communicator exists, since the counts came over it.
        with self._named(chunk, batch):
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
        """Errors of a process group name neither the rank nor what travels."""
        try:
            yield
        except RuntimeError as error:
            ranks = " or ".join(map(str, sorted({op.peer for op in batch})))
            no_answer("Collectives", f"rank {ranks}", f"an error in chunk {chunk} of the rows to {self.where}: {error}")
