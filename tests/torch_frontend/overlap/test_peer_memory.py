"""PeerMemory without GPUs: processes whose programs run on a CPU in a random order (peer_ranks.py), and its errors."""

from datetime import timedelta

import pytest
import torch
from mxep.torch_frontend import PeerMemory

from ...ranks.fixture import Ranks, StartRanks
from . import peer_ranks

TWO, FOUR = 2, 4


@pytest.fixture(scope="module")
def two(start_ranks: StartRanks) -> Ranks:
    return start_ranks(peer_ranks, TWO)


@pytest.fixture(scope="module")
def four(start_ranks: StartRanks) -> Ranks:
    return start_ranks(peer_ranks, FOUR)


@pytest.mark.parametrize("check", peer_ranks.checks(TWO))
def test_two_ranks_have_the_bytes_of_no_transport(two: Ranks, check: str) -> None:
    two.run(check)


OF_RECIPES = [name for name in peer_ranks.checks(FOUR) if name.startswith("recipe")]


@pytest.mark.parametrize("check", ["routings", "overflow", "rounds, plain ffn, dirichlet", *OF_RECIPES])
def test_four_ranks_have_the_bytes_of_no_transport(four: Ranks, check: str) -> None:
    four.run(check)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="PeerMemory: rows: got 0"):
        PeerMemory(rows=0)
    with pytest.raises(ValueError, match=r"PeerMemory: capacity_factor: got 0; allowed: a number above 0"):
        PeerMemory(capacity_factor=0)
    with pytest.raises(TypeError, match=r"PeerMemory: capacity_factor: got '1.25'; allowed: a number above 0"):
        PeerMemory(capacity_factor="1.25")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"capacity_factor: got 1.25 and rows=8; allowed: one of the two"):
        PeerMemory(rows=8, capacity_factor=1.25)
    with pytest.raises(ValueError, match="PeerMemory: on_overflow: got 'zero'; allowed: 'rounds', 'nan', 'drop'"):
        PeerMemory(on_overflow="zero")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="PeerMemory: timeout: got 3"):
        PeerMemory(timeout=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="PeerMemory: timeout"):
        PeerMemory(timeout=timedelta(0))
    with pytest.raises(ValueError, match="PeerMemory: rows: got 0"):
        PeerMemory.choose(rows=0)
    with pytest.raises(ValueError, match="PeerMemory: group: got None; allowed: a process group"):
        PeerMemory.choose()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="PeerMemory: group: got no CUDA; allowed: GPUs of one host"):
        PeerMemory()
