"""A rank that dies or hangs in mid step ends the others, with an error that names it; the ranks are in ep_deaths.py."""

import re

import pytest

from ...ranks.fixture import StartRanks
from . import ep_deaths
from .ep_deaths import RANKS, STAGES, VICTIM

ERROR = r"Collectives: rank ([\d or]+): got an error in chunk \d of the rows to (experts|tokens): .+; see the output"
SURVIVORS = {0, 1, 2} - {VICTIM}
SLACK = 10
"""Seconds from the end of the limit to the error: 0.03 measured; a loaded machine of two cores takes longer."""


def run(start_ranks: StartRanks, stage: str) -> dict[int, tuple[str, float, str]]:
    """What the survivors of this stage tell."""
    found = start_ranks(ep_deaths, RANKS, limit=STAGES[stage].limit).run(stage, lost={VICTIM})
    return {rank: found[rank] for rank in SURVIVORS}


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("before sizes are compared", "dispatch: sizes: got an error while the ranks compare them: "),
        ("before the counts", "dispatch: counts: got an error while the ranks exchange them: "),
    ],
)
def test_the_others_end_and_name_the_collective(stage: str, words: str, start_ranks: StartRanks) -> None:
    for _, seconds, error in run(start_ranks, stage).values():
        assert error.startswith(words)
        assert seconds < STAGES[stage].limit + SLACK


@pytest.mark.parametrize("stage", [name for name, stage in STAGES.items() if stage.transfer >= 0])
def test_the_others_end_and_name_it(stage: str, start_ranks: StartRanks) -> None:
    named = {}
    for rank, (where, seconds, error) in run(start_ranks, stage).items():
        assert where == STAGES[stage].where
        found = re.match(ERROR, error, re.DOTALL)
        assert found, error
        named[rank] = set(map(int, found[1].split(" or ")))
        # Gloo mostly sees at once that the connection of a dead rank is closed; the group's limit ends any wait.
        assert seconds < STAGES[stage].limit + SLACK
    # A rank that waits for a survivor may see the end of that one first; its error leads on to the rank that died.
    assert any(VICTIM in ranks for ranks in named.values())
    for rank, ranks in named.items():
        assert VICTIM in ranks or ranks & (SURVIVORS - {rank})
