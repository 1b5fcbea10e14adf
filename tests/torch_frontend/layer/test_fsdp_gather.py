"""Experts gathered as bytes under FSDP2, over gloo; the checks are in fsdp_gather_ranks.py."""

import pytest

from ...ranks.fixture import Ranks, StartRanks
from . import fsdp_gather_ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, start_ranks: StartRanks) -> Ranks:
    return start_ranks(fsdp_gather_ranks, request.param)


CASES = [(ranks, check) for ranks in (2, 4) for check in fsdp_gather_ranks.checks(ranks)]


@pytest.mark.parametrize(("ranks", "check"), CASES, indirect=["ranks"])
def test_over_gloo(ranks: Ranks, check: str) -> None:
    ranks.run(check)
