"""The all-to-alls of a step without its GEMMs, and the GEMMs without the all-to-alls.

`NoWire`    a transport that sends nothing: the same kernels run, on rows that no rank sent
`run_transfers`  the transfers that a step opened, over a real transport, without any work between them
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.exchange import Step
from mxep.torch_frontend import Collectives
from mxep.torch_frontend.overlap.transport import CHUNK_BYTES, Part, PlannedTransport, Where, allocate_rows
from torch import Tensor

TRANSFERS = 4
"""Transfers of a step: to the experts and back to the tokens, in the forward and in the backward."""


class OpenedTransfer(NamedTuple):
    """The arguments of one transfer; parts instead of its rows."""

    where: Where
    steps: Sequence[Step]
    sent: Sequence[int]
    received: Sequence[int]
    parts: list[Part]


class NoWire(Collectives):
    """Received rows are memory with fixed values, and nothing waits. `transfers`: the last four transfers."""

    def __init__(self, group: dist.ProcessGroup, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(group, chunk_bytes=chunk_bytes)
        self.transfers: deque[OpenedTransfer] = deque(maxlen=TRANSFERS)
        self.rows: dict[tuple[object, ...], tuple[Tensor, ...]] = {}

    def outgoing(self, where: Where, rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, ...]:
        return allocate_rows(rows, parts, device)

    def open_transfer(
        self, where: Where, steps: Sequence[Step], sent: Sequence[int], received: Sequence[int],
        outgoing: tuple[Tensor, ...],
    ) -> "_Still":  # fmt: skip
        parts = [Part(part.shape[1], part.dtype) for part in outgoing]
        self.transfers.append(OpenedTransfer(where, steps, sent, received, parts))
        rows, device = received[self.group.rank()], outgoing[0].device
        key = where, rows, *parts
        if key not in self.rows:
            self.rows[key] = tuple(_values(rows, part, i, device) for i, part in enumerate(parts))
        # As other tensors: a result that is one of them has a graph, which would live as long as this object.
        return _Still(outgoing, tuple(part.detach() for part in self.rows[key]))


def _values(rows: int, part: Part, place: int, device: torch.device) -> Tensor:
    """Rows of ordinary values: a multiplication of zeros takes less power, and then less time."""
    shape = rows, part.width
    if part.dtype != torch.uint8:
        return torch.randn(shape, dtype=part.dtype, device=device)
    if place:  # scales, 2^-7
        return torch.full(shape, 120, dtype=torch.uint8, device=device)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device).bitwise_and_(0xFE)  # E4M3, no NaN


@dataclass
class _Still:
    outgoing: tuple[Tensor, ...]
    received: tuple[Tensor, ...]

    def send(self, chunks: range) -> None:
        pass

    def wait(self, chunk: int) -> None:
        pass

    def abandon(self) -> None:
        pass


def run_transfers(transport: PlannedTransport, transfers: Sequence[OpenedTransfer]) -> None:
    """Send the rows of each transfer, one transfer after the other; the values do not matter."""
    for where, steps, sent, received, parts in transfers:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        buffer = transport.outgoing(where, sent[transport.group.rank()], parts, device)
        transfer, chunks = transport.open_transfer(where, steps, sent, received, buffer), range(len(steps))
        if where == "experts":
            transfer.send(chunks)
        for c in chunks if where == "tokens" else ():
            transfer.send(range(c, c + 1))
        for c in chunks:
            transfer.wait(c)
