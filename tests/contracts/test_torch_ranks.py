"""The contracts of docs/determinism.md over each exchange, on two processes: pairs of the table; all of it if slow."""

import pytest

from ..ranks.fixture import Ranks, StartRanks
from . import torch_ranks
from .table import TORCH, allowed, name_of, pairwise

RANKS = 2


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(torch_ranks, RANKS)


@pytest.mark.parametrize("row", [name_of(row) for row in pairwise(TORCH, allowed)])
def test_replay_forwards_and_ranks(ranks: Ranks, row: str) -> None:
    ranks.run(row)


@pytest.mark.slow
@pytest.mark.parametrize("part", torch_ranks.PRODUCT)
def test_the_whole_product(ranks: Ranks, part: str) -> None:
    """All rows of an exchange and a recipe, 36 to 72 of them."""
    ranks.run(part)


@pytest.fixture(scope="module")
def four_ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(torch_ranks, 4)


@pytest.mark.parametrize("exchange", ["all-to-all", "deduplicate dispatch"])
def test_four_ranks(four_ranks: Ranks, exchange: str) -> None:
    """With two ranks and one process: EP 4 = EP 2 = EP 1."""
    row = next(row for row in pairwise(TORCH, allowed) if row["exchange"] == exchange and row["recipe"] == "mxfp8")
    four_ranks.run(name_of(row))
