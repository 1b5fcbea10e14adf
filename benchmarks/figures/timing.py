"""Interleaved timing: every candidate runs once per round, so that a slow moment of the machine affects all."""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """Median time in microseconds, spread = (p90 - p10) / median, and the number of rounds."""

    us: float
    spread: float
    n: int


def summarize(seconds: list[float]) -> Sample:
    low, median, high = np.percentile(seconds, [10, 50, 90])
    return Sample(us=round(median * 1e6, 2), spread=round((high - low) / median, 3), n=len(seconds))


def interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 31, budget_s: float = 20.0
) -> dict[str, Sample]:
    """Time blocking functions in at most `rounds` rounds and about `budget_s` seconds, and in at least five rounds.

    Two more rounds before compile and fault pages in; they are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    stop = time.perf_counter() + budget_s
    for round_ in range(rounds + 2):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        if round_ >= 7 and time.perf_counter() > stop:
            break
    return {name: summarize(seconds[2:]) for name, seconds in times.items()}
