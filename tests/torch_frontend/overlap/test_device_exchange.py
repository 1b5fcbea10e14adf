"""An exchange that the device drives, without GPUs: its programs on a CPU in a random order (device_ranks.py)."""

import pytest

from ...ranks.fixture import Ranks, StartRanks, with_slow
from . import device_ranks
from .ep_rounds import ROUTINGS

TWO, FOUR = 2, 4
SLOW = "products of rows", "products of replicas", "rounds, ffn, dirichlet"
"""On four ranks: on two they run in every test."""


@pytest.fixture(scope="module")
def two(start_ranks: StartRanks) -> Ranks:
    return start_ranks(device_ranks, TWO)


@pytest.fixture(scope="module")
def four(start_ranks: StartRanks) -> Ranks:
    return start_ranks(device_ranks, FOUR)


@pytest.mark.parametrize("check", with_slow(device_ranks.checks(TWO), ["rounds, ffn, growth"]))
def test_two_ranks_have_the_bytes_of_no_transport(two: Ranks, check: str) -> None:
    two.run(check)


ROUNDS = [f"rounds, ffn, {routing}" for routing in ROUTINGS]


@pytest.mark.parametrize("check", with_slow(["routings", "products of rows", "products of replicas", *ROUNDS], SLOW))
def test_four_ranks_have_the_bytes_of_no_transport(four: Ranks, check: str) -> None:
    four.run(check)
