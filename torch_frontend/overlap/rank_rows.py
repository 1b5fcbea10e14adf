"""This rank's part of mapped memory for one call: its rows, which the experts' ranks pull, and the slots [token][k] of
its tokens, which they push into.

    rows, order, weights --> own memory | programs of all ranks | slots --sum--> tokens
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...core_kernels.oracle_math import Array
from ...core_kernels.peer.programs.program import ADDRESSES
from ...core_kernels.peer.programs.writer import Layout, Memory
from ..ops import direct as ops
from ..routing.weighted_combine import sum_slots
from .rounds import Later, list_later, start_reading
from .rows import Rows

if TYPE_CHECKING:
    from .peer_memory import PeerMemory


class RankRows(NamedTuple):
    """replicas: whether the rows are TokenReplicas. groups: experts of a rank. row_bytes, slot_bytes: of the longest
    row to the experts, and to the tokens. capacity: rows of an operand. room: the most slots that a rank may have, the
    same on all ranks."""

    memory: "PeerMemory"
    tokens: int
    top_k: int
    replicas: bool
    groups: int
    alignment: int
    row_bytes: int
    slot_bytes: int
    capacity: int
    room: int

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k

    @property
    def layout(self) -> Layout:
        return Layout(self.alignment, self.memory.rounds, self.memory.on_overflow == "drop")

    @property
    def places(self) -> Memory:
        """In the memory of every rank."""
        buffer = self.memory.mapped.buffer
        return self._places_from(buffer.starts[1] if buffer is not None else 0)

    @property
    def nbytes(self) -> int:
        return self._places_from(0).end

    def _places_from(self, start: int) -> Memory:
        return Memory.of(start, self.room, self.top_k, self.row_bytes, self.slot_bytes)

    def enlarged(self, counts: Array) -> "RankRows | None":
        """The rows with more memory, or None if they have enough. counts: of all ranks, ~counts of a rank whose rows
        had no slots. A collective if one of them needs more."""
        rows = np.where(counts < 0, ~counts, counts).sum(1).tolist()
        self.memory.note_rows(rows, max(rows) * min(self.top_k, self.groups) // self.top_k)
        capacity, room = self.memory.capacity(self.groups, self.alignment)
        if (capacity, room) == (self.capacity, self.room):
            return None
        found = self._replace(capacity=capacity, room=room)
        self.memory.mapped.barrier()  # no rank reads or writes at these places any more
        self.memory.mapped.allocate(self.groups * self.memory.ranks, found.nbytes)
        return found

    def later(self, counts: Array | None) -> list[Later]:
        """The rounds after the first one. counts: of all ranks; None if there can be one round alone."""
        if counts is None:
            return []
        memory = self.memory
        return list_later(counts, memory.rank, self.slots, self.capacity, self.alignment, memory.device)

    def given(self) -> dict[str, Tensor]:
        """Arrays of every program."""
        buffer = self.memory.mapped.buffer
        assert buffer is not None
        return dict.fromkeys(ADDRESSES, buffer.addresses)

    def write(self, x: Tensor, rows: Rows) -> None:
        """Rows (T, width) to this rank's memory."""
        nbytes = rows.nbytes.length
        rows.write(x, self.own(self.places.rows, (x.shape[0], nbytes), torch.uint8))

    def write_order(self, order: Tensor | None, probs: Tensor | None, rows: Tensor | None = None) -> None:
        """order: None for rows, which are in order. rows: indices of some rows; None is all. Counts of more rows than
        the order has find no slot behind it."""
        n, places = self.slots if rows is None else rows.shape[0], self.places
        own, rest = self.own(places.order, (self.room,), torch.int32).tensor_split([n])
        rest.fill_(-1)
        if order is None and rows is None:
            torch.arange(n, out=own)
        else:
            chosen = order if rows is None else rows if order is None else order[rows]
            assert chosen is not None
            own.copy_(chosen)
        weights = self.own(places.weights, (n,), torch.float32)
        if order is None or probs is None:
            weights.fill_(1.0)
        else:
            torch.index_select(probs.reshape(-1), 0, own, out=weights)

    def sums(self, sources: Tensor, rows: Rows, out: torch.dtype) -> Tensor:
        """(T, width) of dtype `out`: the sum of each token's slots, or the row. sources: of the layout."""
        slots = self._slots(self.places.slots, rows.nbytes.length, torch.uint8)
        values, sources = rows.decoded(slots), sources[: self.slots]
        if self.replicas:
            return sum_slots(values, sources.view(-1, self.top_k), out)
        return ops.permute_rows(values, sources).to(out)  # a sum would turn -0 into +0

    def numbers(self, sources: Tensor) -> Tensor:
        """(T, top_k) fp32, the number of each slot."""
        numbers = self._slots(self.places.numbers, 1, torch.float32)
        return ops.permute_rows(numbers, sources[: self.slots]).view(-1, self.top_k)

    def _slots(self, start: int, width: int, dtype: torch.dtype) -> Tensor:
        """The slots, and the one that a row without a place reads: NaN in every dtype, and in MXFP8."""
        slots = self.own(start, (self.room + 1, width), dtype)
        if self.memory.on_overflow == "nan":
            slots[self.room :].view(torch.uint8).fill_(255)
        return slots

    def own(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An array in this rank's memory."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memory.mapped.own[start : start + nbytes].view(dtype).view(shape)


class Call(Protocol):
    """A call of one of the two exchanges."""

    @property
    def rows(self) -> RankRows: ...

    def with_rows(self, rows: RankRows) -> Self: ...


C = TypeVar("C", bound=Call)
T = TypeVar("T")


def run_first_round(
    call: C, counts: Tensor, write: Callable[[C], None], run: Callable[[C, Tensor], T]
) -> tuple[C, T, Array | None]:
    """Between the writing of own rows and the last barrier: the call with its memory, the result of `run`, and the
    counts of all ranks if there may be later rounds. The host reads the counts when it has launched the round.

    write: rows and order to own memory. run(call, counts): the programs and products, of the counts (ranks, E).
    """
    while True:
        rows = call.rows
        memory, fits = rows.memory, rows.slots <= rows.room
        if fits:
            write(call)
        # Negative counts are of no row: all ranks enlarge their memory, and begin again.
        table = memory.mapped.share_counts(counts if fits else ~counts)
        read = start_reading(table) if memory.rounds else None
        found = run(call, table)
        if read is None:
            return call, found, None
        of_all = read()
        enlarged = rows.enlarged(of_all)
        if enlarged is None:
            return call, found, of_all
        call = call.with_rows(enlarged)
