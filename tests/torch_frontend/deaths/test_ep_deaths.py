"""A rank that dies or hangs in any phase of a step ends the others, with an error that names the exchange; the ranks
are in ep_deaths.py."""

import re

import pytest

from ...ranks.fixture import StartRanks
from . import ep_deaths
from .ep_deaths import DEATHS, EXCHANGE, PHASES
from .survivors import survivors

ENDED = "; see the output of the rank that has ended or does not answer"
COUNTS = "dispatch: counts: got an error while the ranks exchange them: "
SIZES = "dispatch: sizes: got an error while the ranks compare them: "
SUM = "ExpertParallel: gradients: got an error while the ranks add them: "
ROWS = "all-to-all: rows: got an error while the ranks exchange them: "
ALWAYS = {
    **dict.fromkeys([("AllToAll", i) for i in (0, 1, 3, 4, 7, 8, 10, 11, 16, 18)], "KILL"),
    **{("AllToAll", 13): "STOP", ("AllToAll dispatch", 1): "STOP"},
    **{("AllToAll dispatch", 3): "KILL", ("AllToAll both", 17): "KILL", ("function", 0): "KILL"},
}
"""Each phase once, each exchange once, both signals; the others are slow, as a rank that stops costs the limit."""


def in_ci(name: str) -> bool:
    death = DEATHS[name]
    return ALWAYS.get((death.exchange, death.phase)) == death.signal


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if in_ci(name) else pytest.mark.slow) for name in DEATHS])
def test_the_others_end_and_name_the_exchange(name: str, start_ranks: StartRanks) -> None:
    death = DEATHS[name]
    before = PHASES[death.exchange][: death.phase + 1]
    for survivor in survivors(start_ranks, ep_deaths, name).values():
        found = re.fullmatch(f"({SIZES}|{COUNTS}|{ROWS}|{SUM}).+{ENDED}", survivor.error, re.DOTALL)
        assert found, survivor.error
        # The counts come first. A rank that has sent its rows is missed by a later collective.
        if EXCHANGE not in before[:-1]:
            assert found[1] == (SIZES if death.exchange == "function" else COUNTS)
