"""Times of programs that all ranks of a process group run together: the slowest rank counts."""

import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from .timing import Sample, summarize

WARM_UP = 2


def times(runs: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, Sample]:
    """Time of each run on the slowest rank. Every run once per round, every other round backwards; the first rounds
    warm up and are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(WARM_UP + rounds):
        for name, run in list(runs.items())[:: -1 if round_ % 2 else 1]:
            seconds[name].append(_seconds(run, device))
    table = torch.tensor([of_one[WARM_UP:] for of_one in seconds.values()], device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return {name: summarize(row) for name, row in zip(runs, table.tolist(), strict=True)}


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def largest(nbytes: int | None, device: torch.device) -> int | None:
    """The largest value of all ranks; None if it is unknown."""
    if nbytes is None:
        return None
    found = torch.tensor(nbytes, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)
