"""What is wrong on one rank raises on all: two processes over gloo; the checks are in ep_errors.py."""

import pytest

from ...ranks.fixture import Ranks, StartRanks
from . import ep_errors


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(ep_errors, ep_errors.RANKS, limit=30)


@pytest.mark.parametrize("check", ep_errors.checks(ep_errors.RANKS))
def test_two_ranks(ranks: Ranks, check: str) -> None:
    ranks.run(check)
