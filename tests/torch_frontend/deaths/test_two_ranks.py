"""The deaths of tests/gpu/exchange/test_deaths.py on a CPU: a step makes the stated calls, and the program ends.

The exchange that the device drives dies here alone: test_peer_deaths.py has the path without overlap.
"""

from functools import cache

import pytest

from ...gpu.exchange.deaths import KILL, PHASES, STOP
from ...gpu.exchange.two_ranks import list_deaths, require_end, run

ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
DEATHS = list_deaths(PHASES, [KILL, STOP])
ALWAYS = {"device, 2 program, KILL"}
"""The others are slow."""
MESSAGES = "Connection closed|Connection reset|Timed out"


@cache
def seconds_of_all_reduce(kind: str) -> float:
    return run("all-reduce", 0, kind, ON_CPU).seconds


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in DEATHS]
)
def test_the_other_ends(name: str) -> None:
    exchange, phase, kind = DEATHS[name]
    require_end(run(exchange, phase, kind, ON_CPU), seconds_of_all_reduce(kind), MESSAGES)
