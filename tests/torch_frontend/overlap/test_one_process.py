"""Ranks in one process have the bytes of one process without ranks, without a GPU; tests/gpu/exchange/test_one_gpu.py
runs them under compute-sanitizer."""

import pytest

from ...ranks.fixture import Ranks, StartRanks
from . import one_process


@pytest.fixture(scope="module")
def process(start_ranks: StartRanks) -> Ranks:
    return start_ranks(one_process, 1, backend=None)


@pytest.mark.parametrize("check", one_process.checks(1))
def test_ranks_in_one_process(process: Ranks, check: str) -> None:
    process.run(check)
