"""Times of programs that all ranks of a process group run together: the slowest rank counts."""

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from . import device_timing
from .timing import Sample

FIRST = 4
"""Steps whose time says how many steps a stretch has."""


def in_a_row(
    runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 4, groups: int = 5
) -> dict[str, Sample]:
    """Time of a step among steps that follow each other, as device_timing.in_a_row, on the slowest rank: rounds / 2 x
    groups samples. All ranks run the same number of steps."""
    end = device_timing.torch_end(device.type)
    counts = {name: _counts(run, end, device) for name, run in runs.items()}
    seconds: dict[str, list[list[float]]] = {name: [] for name in runs}
    for round_ in range(rounds):
        for name, run in device_timing.alternating(runs, round_):
            settling, steps = counts[name]
            wait = device_timing.launched_ahead(run, end, end(run()), settling)
            seconds[name].append(device_timing.groups_of(run, end, wait, steps, groups))
    table = torch.tensor([seconds[name] for name in runs], device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return device_timing.summarize_pairs(dict(zip(runs, table.tolist(), strict=True)))


def _counts(
    run: Callable[[], object], end: Callable[[object], Callable[[], object]], device: torch.device
) -> tuple[int, int]:
    """The steps in which the clock of the card settles, and the steps of a group."""
    end(run())()
    start = time.perf_counter()
    device_timing.launched_ahead(run, end, end(run()), FIRST - 1)()
    seconds = torch.tensor((time.perf_counter() - start) / FIRST, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    stretches = device_timing.SETTLE_S, device_timing.BATCH_US / 1e6
    settling, steps = (math.ceil(stretch / seconds.item()) for stretch in stretches)
    return settling, steps


def largest(nbytes: int | None, device: torch.device) -> int | None:
    """The largest value of all ranks; None if it is unknown."""
    if nbytes is None:
        return None
    found = torch.tensor(nbytes, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)
