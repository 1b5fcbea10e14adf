"""A rank that dies or hangs in any phase of a layer ends the other one: within the time limit of PeerMemory and the
time that torch's own all-reduce needs, measured at the same time. deaths.py has the ranks. All are slow, as they wait
for limits; several at a time share two GPUs:

    python -m pytest tests/gpu/exchange/test_deaths.py -k without_a_death           first: it compiles the kernels
    python -m pytest -n 16 --dist load tests/gpu/exchange/test_deaths.py -k "device"     or bf16, or all-to-all
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from .deaths import IN_FLIGHT, KILL, PHASES, STOP
from .two_ranks import list_deaths, require_end, run, run_alive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank that waits for another needs two GPUs"),
]
DEATHS = list_deaths(PHASES, [KILL, STOP, f"{KILL} {IN_FLIGHT}"])
OF_NCCL = "Watchdog caught collective operation timeout|got an error while the ranks"
MESSAGES = {"all-to-all": OF_NCCL, "all-reduce": OF_NCCL, "device": f"CUDA error|{OF_NCCL}"}
MESSAGES["bf16"] = MESSAGES["device"]
"""Of the survivor. Over PeerMemory the error of CUDA; of NCCL, if the victim missed the all-reduce alone."""


@cache
def seconds_of_all_reduce(kind: str) -> float:
    """From the death of a rank to the end of the other one in an all-reduce of torch. Measured in each process."""
    found = run("all-reduce", 0, kind)
    assert found.code is not None
    assert found.code != 0, found.output[-4000:]
    return found.seconds


@pytest.mark.parametrize("exchange", [exchange for exchange in PHASES if exchange != "all-reduce"])
def test_without_a_death_both_end(exchange: str) -> None:
    for ended in run_alive(exchange):
        assert ended.code == 0, ended.output[-6000:]


@pytest.mark.parametrize("name", DEATHS)
def test_the_other_ends(name: str) -> None:
    exchange, phase, kind = DEATHS[name]
    with ThreadPoolExecutor(1) as pool:
        measured = pool.submit(seconds_of_all_reduce, kind.removesuffix(f" {IN_FLIGHT}"))
        found = run(exchange, phase, kind)
    of_all_reduce = measured.result()
    print(f"{name}: ended {found.code} after {found.seconds:.1f} s, an all-reduce after {of_all_reduce:.1f} s")
    require_end(found, of_all_reduce, MESSAGES[exchange])
