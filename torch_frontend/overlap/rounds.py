"""A call in rounds: a rank that gets more rows than its capacity gets them in several rounds, so that no row is lost.

    counts of all ranks --copy--> host --list_rounds--> later rounds, the same on all ranks
    round 0                             the call, as if it were the only round
    round 1, 2, ...                     the rows that are left; for the backward nothing is saved

The host waits for the copy alone, not for the work that the stream has got after it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core_kernels.oracle_math import Array
from ...core_kernels.policy.rounds import list_rounds


class Later(NamedTuple):
    """A round but the first. counts (ranks, E) int32: rows that are left at its beginning. rows (M,) int64: the indices
    of this rank's, of `total` in all rounds. first, end: this rank's experts that begin in the round. split: the expert
    before `first` goes on."""

    counts: Tensor
    rows: Tensor
    total: int
    first: int
    end: int
    split: bool

    def add(self, gradients: Sequence[Tensor | None], of_round: Sequence[Tensor | None]) -> None:
        """Gradients of parameters (experts, ...): an expert that is in one round has the bytes of that round."""
        for total, part in zip(gradients, of_round, strict=True):
            if total is not None and part is not None:
                total[self.first : self.end] = part[self.first : self.end]
                if self.split:
                    total[self.first - 1] += part[self.first - 1]


def list_later(
    counts: Array, rank: int, num_rows: int, capacity: int, alignment: int, device: torch.device
) -> list[Later]:
    """counts (ranks, E): of the call. num_rows: of this rank; counts of more have no others. capacity: rows of an
    operand."""
    (all_rows, begun), *others = list_rounds(counts, capacity, alignment)
    found, of_rank, local = [], torch.from_numpy(all_rows[rank]), counts.shape[1] // len(counts)
    first, total = int(begun[rank]), int(of_rank.sum())
    for left, begun in others:
        here, end = torch.from_numpy(left[rank]), int(begun[rank])
        # The rows of an expert that are left are its last ones.
        shift = (of_rank.cumsum(0) - here.cumsum(0)).repeat_interleave(here)
        rows = torch.arange(len(shift)) + shift
        rows = rows[rows < num_rows]
        split = bool(left[:, rank * local + first - 1].any())
        found.append(Later(torch.from_numpy(left).int().to(device), rows.to(device), total, first, end, split))
        first = end
    return found


def start_reading(counts: Tensor) -> Callable[[], Array]:
    """Start a copy to the host; the function that it returns waits for the copy."""
    if counts.device.type == "cpu":
        values = counts.numpy().copy()
        return lambda: values
    on_host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    on_host.copy_(counts, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(counts.device))

    def wait() -> Array:
        copied.synchronize()
        return on_host.numpy()

    return wait
