"""An exchange that the device drives, without GPUs: its programs on a CPU in a random order (device_ranks.py)."""

import pytest

from ...ranks.fixture import Ranks, StartRanks
from . import device_ranks
from .ep_rounds import ROUTINGS

TWO, FOUR = 2, 4


@pytest.fixture(scope="module")
def two(start_ranks: StartRanks) -> Ranks:
    return start_ranks(device_ranks, TWO)


@pytest.fixture(scope="module")
def four(start_ranks: StartRanks) -> Ranks:
    return start_ranks(device_ranks, FOUR)


@pytest.mark.parametrize("check", device_ranks.checks(TWO))
def test_two_ranks_have_the_bytes_of_no_transport(two: Ranks, check: str) -> None:
    two.run(check)


ROUNDS = [f"rounds, ffn, {routing}" for routing in ROUTINGS]


@pytest.mark.parametrize("check", ["routings", "products of rows", "products of replicas", *ROUNDS])
def test_four_ranks_have_the_bytes_of_no_transport(four: Ranks, check: str) -> None:
    four.run(check)
