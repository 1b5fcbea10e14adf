"""A rank that dies or hangs in any phase of a step ends the others, with an error that names the exchange; the ranks
are in ep_deaths.py."""

import re

import pytest

from ...ranks.fixture import StartRanks
from . import ep_deaths
from .ep_deaths import DEATHS, EXCHANGE, PHASES, RANKS, VICTIM
from .survivors import survivors

ENDED = "; see the output of the rank that has ended or does not answer"
COUNTS = "dispatch: counts: got an error while the ranks exchange them: "
SIZES = "dispatch: sizes: got an error while the ranks compare them: "
SUM = "ExpertParallel: gradients: got an error while the ranks add them: "
ROWS = "all-to-all: rows: got an error while the ranks exchange them: "
CHUNK = r"Collectives: rank ([\d or]+): got an error in chunk \d of the rows to (experts|tokens): "
ALWAYS = {
    **dict.fromkeys([("AllToAll", i) for i in (0, 1, 3, 4, 7, 8, 10, 11, 16, 18)], "KILL"),
    **{("AllToAll", 13): "STOP", ("Collectives", 7): "STOP", ("AllToAll dispatch", 1): "STOP"},
    **dict.fromkeys([("Collectives", i) for i in (4, 5, 6, 15, 17, 22)], "KILL"),
    **{("AllToAll dispatch", 3): "KILL", ("AllToAll both", 17): "KILL", ("function", 0): "KILL"},
}
"""Each phase once, each exchange once, both signals; the others are slow, as a rank that stops costs the limit."""


def in_ci(name: str) -> bool:
    death = DEATHS[name]
    return ALWAYS.get((death.exchange, death.phase)) == death.signal


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if in_ci(name) else pytest.mark.slow) for name in DEATHS])
def test_the_others_end_and_name_the_exchange(name: str, start_ranks: StartRanks) -> None:
    death = DEATHS[name]
    before, named = PHASES[death.exchange][: death.phase + 1], {}
    for rank, survivor in survivors(start_ranks, ep_deaths, name).items():
        found = re.fullmatch(f"({SIZES}|{COUNTS}|{ROWS}|{CHUNK}|{SUM}).+{ENDED}", survivor.error, re.DOTALL)
        assert found, survivor.error
        # The counts come first. A rank that has sent its rows is missed by a later collective.
        if EXCHANGE not in before[:-1]:
            assert found[1] == (SIZES if death.exchange == "function" else COUNTS)
        if found[2]:
            named[rank] = set(map(int, found[2].split(" or ")))
    # A rank that waits for a survivor may see the end of that one first; its error leads on to the rank that died.
    assert not named or any(VICTIM in ranks for ranks in named.values())
    for rank, ranks in named.items():
        assert VICTIM in ranks or ranks & (set(range(RANKS)) - {rank})
