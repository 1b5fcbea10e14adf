"""A rank that dies or hangs in any phase of a layer ends the other one: within the time limit of PeerMemory and the
time that torch's own all-reduce needs in the same run. deaths.py has the ranks.

    test_without_a_death  --> compiles the kernels
    test_the_other_ends   --> all deaths that are selected, AT_ONCE at a time, on two GPUs; a test waits for its own

All are slow, as they wait for limits. A part of at most 8 minutes: -k "device", "bf16" or "all-to-all".
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from .deaths import IN_FLIGHT, KILL, PHASES, STOP
from .two_ranks import Ended, list_deaths, require_end, run, run_alive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank that waits for another needs two GPUs"),
]
AT_ONCE = 12
"""Two processes each. More spend the time of their limits on starting: each imports torch and needs 2 GiB."""
DEATHS = list_deaths(PHASES, [KILL, STOP, f"{KILL} {IN_FLIGHT}"])
OF_NCCL = "Watchdog caught collective operation timeout|got an error while the ranks"
MESSAGES = {"all-to-all": OF_NCCL, "all-reduce": OF_NCCL, "device": f"CUDA error|{OF_NCCL}"}
MESSAGES["bf16"] = MESSAGES["device"]
"""Of the survivor. Over PeerMemory the error of CUDA; of NCCL, if the victim missed the all-reduce alone."""


class Running(NamedTuple):
    """By name of a death. of_all_reduce: by its signal, of an all-reduce of torch."""

    deaths: dict[str, Future[Ended]]
    of_all_reduce: dict[str, Future[Ended]]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    tests: Any = [test for test in request.session.items if test.parent is request.node]
    names = [test.callspec.params["name"] for test in tests if "name" in test.callspec.params]
    pool = ThreadPoolExecutor(AT_ONCE)
    of_all_reduce = {kind: pool.submit(run, "all-reduce", 0, kind) for kind in (KILL, STOP)}
    yield Running({name: pool.submit(run, *DEATHS[name]) for name in names}, of_all_reduce)
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("exchange", [exchange for exchange in PHASES if exchange != "all-reduce"])
def test_without_a_death_both_end(exchange: str) -> None:
    for ended in run_alive(exchange):
        assert ended.code == 0, ended.output[-6000:]


@pytest.mark.parametrize("name", DEATHS)
def test_the_other_ends(name: str, running: Running) -> None:
    exchange, _, kind = DEATHS[name]
    measure = running.of_all_reduce[kind.removesuffix(f" {IN_FLIGHT}")].result()
    assert measure.code, f"torch's own all-reduce ended with {measure.code}: {measure.output[-4000:]}"
    found = running.deaths[name].result()
    print(f"{name}: ended {found.code} after {found.seconds:.1f} s, an all-reduce after {measure.seconds:.1f} s")
    require_end(found, measure.seconds, MESSAGES[exchange])
