"""The protocol of transfers: the rows of an exchange are sent to offsets that the host has planned.

    outgoing = transport.outgoing(...)          the send buffer of this rank
    transfer = transport.open_transfer(..., outgoing)     transfer.received: the receive buffer
    transfer.send(range(c, d))                  sends the rows of chunks when the current stream has written the rows
    transfer.wait(c)                            the current stream waits until chunk c of transfer.received is written
    transfer.abandon()                          after an error: the next transfer can be opened

All ranks open the same transfers in the same order and send their chunks in the same order.
`core_kernels/policy/exchange.py` says which rows go where; every transport writes the same bytes.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.exchange import Step
from ..exchange.process_groups import name_of
from ..ops.private import group_named

Where = Literal["experts", "tokens"]
CHUNK_BYTES = 2**26
TIMEOUT = timedelta(minutes=10)
ALIGNMENT = 256
"""Bytes: each part of a buffer begins at a multiple."""


class Part(NamedTuple):
    """One of the arrays that are sent together: the values of a row and their dtype."""

    width: int
    dtype: torch.dtype


class Transfer(Protocol):
    """The rows of one exchange in one direction. outgoing, received: a tensor per part; rows of `received` that no rank
    fills are uninitialized."""

    outgoing: tuple[Tensor, ...]
    received: tuple[Tensor, ...]

    def send(self, chunks: range) -> None: ...
    def wait(self, chunk: int) -> None: ...
    def abandon(self) -> None:
        """End the transfer after an error: its unsent chunks are never sent, and no rank waits for them. If all ranks
        fail at the same chunk, the transport can open the next transfer. Raises nothing of its own."""
        ...


class PlannedTransport(Protocol):
    """A transport that opens transfers between the ranks of `group`.

    chunk_bytes: a chunk of experts has about so many bytes of rows, so that the device works on it longer than the host
    prepares it.
    """

    group: dist.ProcessGroup
    chunk_bytes: int

    def outgoing(self, where: Where, rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, ...]:
        """An uninitialized send buffer for the rows of the next transfer to the experts' operands or to the tokens. Its
        rows are sent without a copy. The current stream may write to the buffer after this call."""
        ...

    def open_transfer(
        self, where: Where, steps: Sequence[Step], sent: Sequence[int], received: Sequence[int],
        outgoing: tuple[Tensor, ...],
    ) -> Transfer:  # fmt: skip
        """A transfer to the experts' operands or to the tokens. steps: of the chunks. sent, received: rows of each
        rank. outgoing: the rows of this rank; from `outgoing`, or any other tensors."""
        ...


def find_group(op: str, group: "str | dist.ProcessGroup | None") -> dist.ProcessGroup:
    """The process group; raises TypeError and ValueError if there is none."""
    name = name_of(op, "group", group)
    if not name:
        fail(ValueError, op, "group", repr(group), "allowed: a process group; call init_process_group before")
    return group_named(name)


def to_milliseconds(op: str, timeout: timedelta) -> int:
    """The limit of a wait on a GPU; raises ValueError unless it is a timedelta of a millisecond or more."""
    if not isinstance(timeout, timedelta) or timeout < timedelta(milliseconds=1):
        fail(ValueError, op, "timeout", repr(timeout), "allowed: a timedelta of a millisecond or more")
    return int(timeout / timedelta(milliseconds=1))


def allocate_rows(rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, ...]:
    """Uninitialized rows."""
    return tuple(torch.empty((rows, part.width), dtype=part.dtype, device=device) for part in parts)


def allocate_received(outgoing: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    """An uninitialized receive buffer for `rows` rows of the sent parts."""
    return tuple(part.new_empty((rows, part.shape[1])) for part in outgoing)


def offsets_of(rows: Sequence[int], parts: Sequence[Part]) -> list[int]:
    """The first byte of each part in a buffer of at most so many rows, and the end of the last part."""
    sizes = [-(-max(rows) * part.width * part.dtype.itemsize // ALIGNMENT) * ALIGNMENT for part in parts]
    return list(accumulate(sizes, initial=0))


def views_of(memory: Tensor, rows: int, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """The parts of a buffer of `rows` rows."""
    sizes = [rows * part.width * part.dtype.itemsize for part in parts]
    return tuple(
        memory[at : at + nbytes].view(part.dtype).view(rows, part.width)
        for at, nbytes, part in zip(offsets_of([rows], parts), sizes, parts, strict=False)
    )
