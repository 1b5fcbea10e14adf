"""Time and energy of whole optimizer steps, which take seconds each: every step is a measurement.

In every round a candidate runs two steps that do not count, which take longer than the clock of the card needs to
settle, and then the counted ones without a pause: a step is launched before the host waits for the step before it.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

from .device_timing import Step, alternating, summarize_pairs
from .energy import Counter
from .timing import Sample


class Steps(NamedTuple):
    """joules: of a step, over all counted steps; None without a counter."""

    sample: Sample
    joules: float | None


def training_steps(
    candidates: Mapping[str, Step], read: Counter | None, rounds: int = 4, steps: int = 5
) -> dict[str, Steps]:
    """rounds / 2 x steps samples of each candidate: every other round runs backwards, and a sample is the mean of a
    step and the same step of the next round.

    The energy counter is read where a stretch of counted steps begins and ends. It is a tenth of a second old at most,
    of a stretch of several seconds."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in candidates}
    millijoules = dict.fromkeys(candidates, 0)
    for round_ in range(rounds):
        for name, (run, end) in alternating(candidates, round_):
            wait, following = end(run()), end(run())
            wait()
            wait, found = following, []
            before, start = read() if read else 0, time.perf_counter()
            for _ in range(steps):
                following = end(run())
                wait()
                wait, now = following, time.perf_counter()
                found.append(now - start)
                start = now
            millijoules[name] += (read() if read else 0) - before
            wait()
            seconds[name].append(found)
    samples = summarize_pairs(seconds)
    counted = rounds * steps * 1e3
    return {name: Steps(samples[name], round(millijoules[name] / counted, 2) if read else None) for name in candidates}
