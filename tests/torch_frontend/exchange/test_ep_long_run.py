"""Ranks hold no more memory, descriptors or threads after many exchanges; the ranks are in ep_long_run.py."""

import pytest

from ...frontends.long_run import require_no_growth
from ...ranks.fixture import Ranks, StartRanks
from . import ep_long_run
from .ep_long_run import EXCHANGES, RANKS

MIB = 2**20


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(ep_long_run, RANKS, check_limit=600)


@pytest.mark.parametrize("exchange", ["AllToAll"])
def test_ranks_keep_nothing_of_100_exchanges(exchange: str, ranks: Ranks) -> None:
    for before, after in ranks.run(f"{exchange}, 100"):
        require_no_growth(before, after, 4 * MIB)  # 1.7 MiB measured, of which 1.2 in the first process alone


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_keep_nothing_of_2000_exchanges(exchange: str, ranks: Ranks) -> None:
    for before, after in ranks.run(f"{exchange}, 2000"):
        require_no_growth(before, after, 8 * MIB)
