"""A rank of PeerMemory that dies or hangs in any phase of a step ends the others; the ranks are in peer_deaths.py."""

import pytest

from ...ranks.fixture import StartRanks
from . import peer_deaths
from .peer_deaths import BARRIER, DEATHS
from .survivors import survivors

ALWAYS = {f"PeerMemory, 1 {BARRIER}, KILL", f"PeerMemory in rounds, 5 {BARRIER}, KILL"}
"""The others are slow."""


@pytest.mark.parametrize(
    "death", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in DEATHS]
)
def test_the_others_end(death: str, start_ranks: StartRanks) -> None:
    for survivor in survivors(start_ranks, peer_deaths, death).values():
        # On GPUs the error is of CUDA: tests/gpu/exchange/test_ranks.py.
        assert any(words in survivor.error for words in ("Connection closed", "Connection reset", "Timed out")), (
            survivor
        )
