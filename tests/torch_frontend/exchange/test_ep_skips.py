"""An error in a transfer: alike on all ranks and caught, the next step is right; on one rank all end, and the other
ranks name it. The ranks are in ep_skips.py."""

from pathlib import Path

import pytest

from ..forked import run_script
from .ep_skips import LIMIT, RANKS, WHERE

SCRIPT = Path(__file__).with_name("ep_skips.py")
SLACK = 60
"""Seconds from the limit of the process group to the end; 0.1 measured."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skips")
    status, errors = run_script(SCRIPT, folder)
    assert status == 0, errors
    return folder


def steps(out: Path, where: str, who: str, rank: int) -> list[tuple[float, str]]:
    lines = [line.split(" ", 1) for line in (out / f"{where}-{who}-{rank}").read_text().splitlines()]
    return [(float(seconds), end) for seconds, end in lines]


@pytest.mark.parametrize("where", WHERE)
def test_all_ranks_skip_the_batch(where: str, out: Path) -> None:
    for rank in range(RANKS):
        assert [end for _, end in steps(out, where, "all", rank)] == [
            "right",
            f"Skipped: no memory in the {where}",
            "right",
        ]


@pytest.mark.parametrize("where", WHERE)
def test_one_rank_ends_all(where: str, out: Path) -> None:
    failing, other = (steps(out, where, "one", rank) for rank in range(RANKS))
    assert [failing[0][1], other[0][1]] == ["right", "right"]
    assert failing[1][1] == f"Skipped: no memory in the {where}"
    assert other[1][1].startswith("RuntimeError: Collectives: rank 0: got an error in chunk "), other
    assert failing[2][1].startswith("RuntimeError: "), failing
    assert other[2][1].startswith("RuntimeError: "), other
    assert all(seconds < LIMIT + SLACK for seconds, _ in failing + other)
