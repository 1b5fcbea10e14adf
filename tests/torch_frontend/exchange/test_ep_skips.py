"""An error in a transfer: alike on all ranks and caught, the next step is right; on one rank all end, and the other
ranks name it. The checks are in ep_skips.py."""

import pytest

from ...ranks.fixture import Ranks, StartRanks
from . import ep_skips
from .ep_skips import LIMIT, RANKS, WHERE

SLACK = 60
"""Seconds from the limit of the process group to the end; 0.1 measured."""


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(ep_skips, RANKS, limit=LIMIT)


@pytest.mark.parametrize("check", [name for name in ep_skips.checks(RANKS) if name.startswith("skips")])
def test_the_steps_around_a_batch_have_the_bytes_of_no_transport(check: str, ranks: Ranks) -> None:
    ranks.run(check)


@pytest.mark.parametrize("where", WHERE)
def test_all_ranks_skip_the_batch(where: str, ranks: Ranks) -> None:
    for steps in ranks.run(f"{where}-all"):
        assert [end for _, end in steps] == ["right", f"Skipped: no memory in the {where}", "right"]


@pytest.mark.parametrize("where", WHERE)
def test_one_rank_ends_all(where: str, ranks: Ranks) -> None:
    failing, other = ranks.run(f"{where}-one")
    ranks.stop()  # their group is of no more use
    assert [failing[0][1], other[0][1]] == ["right", "right"]
    assert failing[1][1] == f"Skipped: no memory in the {where}"
    assert other[1][1].startswith("RuntimeError: Collectives: rank 0: got an error in chunk "), other
    assert failing[2][1].startswith("RuntimeError: "), failing
    assert other[2][1].startswith("RuntimeError: "), other
    assert all(seconds < LIMIT + SLACK for seconds, _ in failing + other)
