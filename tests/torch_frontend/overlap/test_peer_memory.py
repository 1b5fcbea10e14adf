"""PeerMemory without GPUs: two processes with kernels in Triton's interpreter (peer_ranks.py), and its errors."""

from datetime import timedelta

import pytest
import torch
from mxep.torch_frontend import PeerMemory

from ...ranks.fixture import Ranks, StartRanks, with_slow
from . import peer_ranks

RANKS = 2
SLOW = [f"rounds, plain ffn, {what}" for what in ("an error in the forward", "default", "cached weights")]
SLOW += ["rounds, ffn in all transfers, one_expert"]


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(peer_ranks, RANKS)


@pytest.mark.parametrize("check", with_slow(peer_ranks.checks(RANKS), SLOW))
def test_two_ranks_have_the_bytes_of_no_transport(ranks: Ranks, check: str) -> None:
    ranks.run(check)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="PeerMemory: rows: got 0"):
        PeerMemory(rows=0)
    with pytest.raises(ValueError, match=r"PeerMemory: capacity_factor: got 0; allowed: a number above 0"):
        PeerMemory(capacity_factor=0)
    with pytest.raises(TypeError, match=r"PeerMemory: capacity_factor: got '1.25'; allowed: a number above 0"):
        PeerMemory(capacity_factor="1.25")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"capacity_factor: got 1.25 and rows=8; allowed: one of the two"):
        PeerMemory(rows=8, capacity_factor=1.25)
    with pytest.raises(ValueError, match=r"on_overflow: got 'drop' and rounds=True; allowed: with rounds=False"):
        PeerMemory(on_overflow="drop")
    with pytest.raises(TypeError, match="PeerMemory: rounds: got 2"):
        PeerMemory(rounds=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="PeerMemory: width: got"):
        PeerMemory(width=1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="PeerMemory: timeout: got 3"):
        PeerMemory(timeout=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="PeerMemory: timeout"):
        PeerMemory(timeout=timedelta(0))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="PeerMemory: group: got no CUDA; allowed: GPUs of one host"):
        PeerMemory()
