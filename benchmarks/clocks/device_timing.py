"""Time on the GPU, and of the host that feeds it. Every candidate runs once per round (timing.py).

events    one launch between two CUDA events, caches cold: torch programs
programs  one clock for torch and JAX, whose stream takes no events from outside:
 batches    N launches, then one wait, divided by N; the wait adds the same to both
 kernels    the time of the kernels in CUPTI's record, for programs that run faster than a host launches them
in_a_row  steps that follow each other, as in training, from the end of one to the end of another; torch and JAX
host      the time until an eager call returns, without waiting for the device; the quietest of many stretches of calls

Every other round runs backwards, and a sample is the mean of a round and the next. The clock of the card follows the
load before a candidate: without the pairing, a candidate near the power limit has two kinds of samples, up to 10%
apart, and their median is either of them.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from .timing import Sample, summarize

T = TypeVar("T")
Candidates = Mapping[str, Callable[[], object]]
Program = tuple[Callable[[], Any], Callable[[Any], object]]
"""A call, and a function that waits for its result."""
Programs = Mapping[str, Program]
Step = tuple[Callable[[], Any], Callable[[Any], Callable[[], object]]]
"""A call, and a function of its result that makes a wait for it, which keeps little of the result's memory."""
Each = Callable[[Candidates], dict[str, Sample]]
"""A clock: candidates -> a sample of each."""
L2_NBYTES = 256 << 20  # several times an H200's L2
# Keeps the device busy for about half a millisecond while the host enqueues the candidate: no launch gap is measured.
BUSY_CYCLES = 1_000_000
# JAX takes a tenth of a millisecond to launch a first program on an idle device: 0.2% of a batch of this length.
BATCH_US = 50_000
# The clock of a card near its power limit follows a change of load within this time: of a plain bf16 layer behind an
# MXFP8 one, the second and third step take 2% longer than later ones.
SETTLE_S = 0.25
# Upper bound of the host time of a framework's launch on a busy host.
SHORT_US = 250


def torch_wait(device: str) -> Callable[[object], None]:
    """A function that waits for torch's work on the device, whatever its argument."""
    return (lambda _: torch.cuda.synchronize()) if device == "cuda" else lambda _: None


def torch_end(device: str) -> Callable[[object], Callable[[], object]]:
    """A wait for torch's work on the device up to here, whatever the argument."""

    def end(_: object) -> Callable[[], object]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    return end if device == "cuda" else lambda _: lambda: None


def jax_end(result: Any) -> Callable[[], object]:
    """A wait for the outputs of a program of JAX, which are there at the same time; the smallest is kept until then."""
    import jax

    return partial(jax.block_until_ready, min(jax.tree.leaves(result), key=lambda leaf: leaf.size))


def alternating(candidates: Mapping[str, T], round_: int) -> list[tuple[str, T]]:
    """The candidates of a round; every other round runs backwards."""
    return list(candidates.items())[:: -1 if round_ % 2 else 1]


def _there_and_back(times: Mapping[str, list[float]]) -> dict[str, Sample]:
    """Seconds per round -> samples of two rounds each; the number of rounds is even."""
    both = {name: zip(seconds[::2], seconds[1::2], strict=True) for name, seconds in times.items()}
    return {name: summarize([(a + b) / 2 for a, b in pairs]) for name, pairs in both.items()}


def events(candidates: Candidates, samples: int = 15) -> dict[str, Sample]:
    """Device time of each candidate; the first two rounds warm up and are not counted."""
    evict = torch.ones(L2_NBYTES // 4, dtype=torch.int32, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(2 + 2 * samples):
        for name, run in alternating(candidates, round_):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            evict.max()  # a read leaves clean cache lines: nothing is written back while the candidate runs
            torch.cuda._sleep(BUSY_CYCLES)
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return _there_and_back({name: seconds[2:] for name, seconds in times.items()})


def programs(candidates: Programs, least_calls: int = 4) -> dict[str, Sample]:
    """Device time of each candidate. The length of the first one selects the clock; a batch has at
    least `least_calls` calls.

    Results are dropped at once, so that buffers are reused.
    """
    (estimate,) = batches(dict([next(iter(candidates.items()))]), calls=4, samples=1).values()
    if estimate.us < SHORT_US and torch.cuda.is_available():
        return kernels(candidates)
    calls = min(max(int(BATCH_US / estimate.us), least_calls), 200)
    return batches(candidates, calls)


def batches(candidates: Programs, calls: int, samples: int = 4) -> dict[str, Sample]:
    """Time per call of `calls` calls back to back, after a call; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(1 + 2 * samples):
        for name, (run, wait) in alternating(candidates, round_):
            wait(run())
            start = time.perf_counter()
            for _ in range(calls - 1):
                run()
            wait(run())
            times[name].append((time.perf_counter() - start) / calls)
    return _there_and_back({name: seconds[1:] for name, seconds in times.items()})


def in_a_row(steps: Mapping[str, Step], rounds: int = 4, groups: int = 5) -> dict[str, Sample]:
    """Time of a step among steps that follow each other: rounds / 2 x groups samples.

    In every round a candidate runs for `SETTLE_S`, and without a pause for as many groups of steps as long as
    `BATCH_US`. A step is launched before the host waits for the step before it, so the device does not wait for the
    host where the host is faster.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in steps}
    for round_ in range(rounds):
        for name, step in alternating(steps, round_):
            times[name].append(_groups(*step, groups))
    return summarize_pairs(times)


def summarize_pairs(rounds: Mapping[str, list[list[float]]]) -> dict[str, Sample]:
    """Seconds of the groups of each round -> samples, each of a group and the same group of the next round; the number
    of rounds is even."""
    there_and_back = {
        name: [
            t for pair in zip(found[::2], found[1::2], strict=True) for both in zip(*pair, strict=True) for t in both
        ]
        for name, found in rounds.items()
    }
    return _there_and_back(there_and_back)


def settle(
    run: Callable[[], Any], end: Callable[[Any], Callable[[], object]]
) -> tuple[Callable[[], object], int, float]:
    """Run steps for `SETTLE_S`: a wait for the last one, which is launched, the number of the others, the seconds."""
    end(run())()  # compiles
    wait, settled, start = end(run()), 0, time.perf_counter()
    while not settled or time.perf_counter() - start < SETTLE_S:
        following = end(run())
        wait()
        wait, settled = following, settled + 1
    return wait, settled, time.perf_counter() - start


def launched_ahead(
    run: Callable[[], Any], end: Callable[[Any], Callable[[], object]], wait: Callable[[], object], steps: int
) -> Callable[[], object]:
    """Launch steps, and wait each time for the step before. wait: for the step that is launched; returns the wait for
    the last one."""
    for _ in range(steps):
        following = end(run())
        wait()
        wait = following
    return wait


def groups_of(
    run: Callable[[], Any],
    end: Callable[[Any], Callable[[], object]],
    wait: Callable[[], object],
    steps: int,
    groups: int,
) -> list[float]:
    """Seconds per step of each group of so many steps, without a pause. wait: for the step that is launched."""
    found = []
    for _ in range(groups):
        start = time.perf_counter()
        wait = launched_ahead(run, end, wait, steps)
        found.append((time.perf_counter() - start) / steps)
    wait()
    return found


def _groups(run: Callable[[], Any], end: Callable[[Any], Callable[[], object]], groups: int) -> list[float]:
    """Seconds per step of each group."""
    wait, settled, seconds = settle(run, end)
    return groups_of(run, end, wait, math.ceil(BATCH_US / 1e6 * settled / seconds), groups)


def kernels(candidates: Programs, calls: int = 50, samples: int = 4) -> dict[str, Sample]:
    """Time per call of kernels, copies and fills of any framework, without the gaps between them.

    Raises RuntimeError if CUPTI recorded nothing.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(1 + 2 * samples):
        for name, (run, wait) in alternating(candidates, round_):
            wait(run())
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(calls - 1):
                    run()
                wait(run())
            us = sum(event.device_time for event in seen.events() or () if event.device_type.name == "CUDA")
            if not us:
                raise RuntimeError(f"kernels: {name}: the profiler saw nothing run on a GPU")
            times[name].append(us / 1e6 / calls)
    return _there_and_back({name: seconds[1:] for name, seconds in times.items()})


def host(candidates: Candidates, wait: Callable[[], object], stretches: int = 60, calls: int = 50) -> dict[str, Sample]:
    """Host time of a call, from the stretch of calls with the lowest median.

    Other work of the machine makes a call slower, never faster, and lasts longer than one stretch: the stretches of
    all candidates alternate. The wait between stretches keeps the launch queue from filling up.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in candidates}
    gc.disable()
    try:
        for round_ in range(stretches + 1):
            for name, run in alternating(candidates, round_):
                wait()
                times[name].append([_seconds(run) for _ in range(calls)])
    finally:
        gc.enable()
        wait()
    return {name: summarize(min(found[1:], key=statistics.median)) for name, found in times.items()}


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_nbytes(run: Callable[[], object]) -> int | None:
    """Peak of the bytes requested from torch's CUDA allocator by `run`, its result included; None without a GPU."""
    return with_peak(run)[1]


def with_peak(run: Callable[[], T]) -> tuple[T, int | None]:
    """The result of `run`, and `peak_nbytes` of it."""
    if not torch.cuda.is_available():
        return run(), None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # else memory that another stream has used counts as held until the next allocation
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = run()
    return result, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
