"""One of three ranks of PeerMemory on a CPU dies or hangs in mid step; run by test_peer_deaths.py. Programs, memory and
barriers are as in peer_ranks.py: the barrier is of Gloo, and so is its time limit."""

from collections.abc import Callable
from functools import partial

from mxep.torch_frontend import ExpertParallel
from mxep.torch_frontend.overlap.mapped_memory import MappedMemory
from mxep.torch_frontend.overlap.prepared import Prepared

from ..overlap import peer_ranks
from . import ep_deaths
from .ep_deaths import BACKWARD, BEFORE, EXPERTS, GRADIENTS, RANKS, REDUCE, Layer, watch

PROGRAM, BARRIER = "program", "barrier"
FORWARD = [BARRIER, PROGRAM, EXPERTS, PROGRAM]
GRADIENT = [BARRIER, PROGRAM, GRADIENTS, PROGRAM]
PHASES = [BEFORE, *FORWARD, BARRIER, BACKWARD, *GRADIENT, BARRIER, REDUCE]
AGAIN = [BARRIER, *FORWARD[:-1]]
OF_ROUNDS = [
    BEFORE, *FORWARD, BARRIER, *FORWARD, BARRIER, BACKWARD, *GRADIENT, *AGAIN, BARRIER, *GRADIENT, BARRIER, REDUCE,
]  # fmt: skip
"""Of two rounds: the second one has the steps of the first, and its backward also the steps of its forward."""
EXCHANGES = {"PeerMemory": PHASES, "PeerMemory in rounds": OF_ROUNDS}
DEATHS = {
    name: death for exchange, phases in EXCHANGES.items() for name, death in ep_deaths.deaths(exchange, phases).items()
}


def begin(rank: int) -> None:
    peer_ranks.begin(rank)
    ep_deaths.begin(rank)
    watch(Prepared, "__call__", PROGRAM)
    watch(MappedMemory, "barrier", BARRIER)


def layer(exchange: str) -> Layer:
    group = ep_deaths.limited_group()
    rounds = exchange == "PeerMemory in rounds"
    memory = peer_ranks.files().open(group, 1 if rounds else ep_deaths.TOKENS * ep_deaths.TOP_K * RANKS)
    layer = ep_deaths.sharded(ExpertParallel(transport=memory), group)
    # The same experts for all tokens: they have more rows than the capacity.
    chosen = (lambda x: layer(x * 0 + 1)) if rounds else layer
    ep_deaths.step(chosen)  # the first step compares arguments and maps memory
    return chosen


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    return {name: partial(ep_deaths.run, death, layer, EXCHANGES[death.exchange]) for name, death in DEATHS.items()}
