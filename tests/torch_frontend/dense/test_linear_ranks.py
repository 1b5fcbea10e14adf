"""Dense layers under FSDP2 and tensor parallelism over gloo, on two processes; the checks are in linear_ranks.py."""

import pytest

from ...ranks.fixture import Ranks, StartRanks
from . import linear_ranks

RANKS = linear_ranks.RANKS


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(linear_ranks, RANKS)


@pytest.mark.parametrize("check", linear_ranks.checks(RANKS))
def test_over_gloo(ranks: Ranks, check: str) -> None:
    ranks.run(check)
