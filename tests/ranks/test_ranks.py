"""The fixture that starts ranks: what a test sees of a check that fails, hangs or dies, and what the next meets."""

import os
import sys
import time
from collections.abc import Callable

import pytest

from .fixture import Ranks, StartRanks

RAN: list[int] = []
"""In a rank: its number, as often as it ran `counts`."""


def begin(rank: int) -> None:
    RAN.append(rank)


def counts() -> tuple[int, int]:
    RAN.append(RAN[0])
    return os.getpid(), len(RAN)


def all_fail() -> None:
    raise ValueError(f"rank {RAN[0]} has its own words")


def one_fails() -> None:
    if RAN[0] == 1:
        print("last words", file=sys.stderr, flush=True)
        raise SystemExit("rank 1 goes")


def all_wait() -> None:
    time.sleep(1000)


def one_waits() -> None:
    if RAN[0] == 1:
        time.sleep(1000)
    raise ValueError("nobody answers")


def one_dies() -> int:
    if RAN[0] == 1:
        os._exit(3)
    return RAN[0]


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    return {f.__name__: f for f in (counts, all_fail, one_fails, all_wait, one_waits, one_dies)}


@pytest.fixture(scope="module")
def ranks(start_ranks: StartRanks) -> Ranks:
    return start_ranks(sys.modules[__name__], 2, backend=None, check_limit=3)


def test_processes_stay_for_the_next_check(ranks: Ranks) -> None:
    first, second = (ranks.run("counts") for _ in range(2))
    assert len({os.getpid(), *(pid for pid, _ in first)}) == 3
    assert [(pid, number + 1) for pid, number in first] == second


@pytest.mark.parametrize(
    ("check", "of_first", "of_second"),
    [
        ("all_fail", "ValueError: rank 0 has its own words", "ValueError: rank 1 has its own words"),
        ("one_fails", "passed", "SystemExit: rank 1 goes"),
        ("all_wait", "in all_wait", "in all_wait"),
        ("one_waits", "ValueError: nobody answers", "in one_waits"),
        ("one_dies", "passed", "its process has ended"),
    ],
)
def test_a_failure_shows_every_rank_and_replaces_the_processes(
    ranks: Ranks, check: str, of_first: str, of_second: str
) -> None:
    before = {pid for pid, _ in ranks.run("counts")}
    with pytest.raises(pytest.fail.Exception) as found:
        ranks.run(check)
    told, printed = str(found.value).split("--- printed")
    _, first, second = told.split("--- rank ")
    assert first.startswith("0: ")
    assert of_first in first
    assert second.startswith("1: ")
    assert of_second in second
    assert ("last words" in printed) == (check == "one_fails")
    after = ranks.run("counts")
    assert not before & {pid for pid, _ in after}
    assert [number for _, number in after] == [2, 2]


def test_a_rank_may_be_lost(ranks: Ranks) -> None:
    before = {pid for pid, _ in ranks.run("counts")}
    assert ranks.run("one_dies", lost={1}) == [0, None]
    with pytest.raises(pytest.fail.Exception, match="rank 1: ran to the end"):
        ranks.run("counts", lost={1})
    assert not before & {pid for pid, _ in ranks.run("counts")}


def test_a_module_that_cannot_start_says_why(start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "__name__", "tests.no_such_module")
    with pytest.raises(pytest.fail.Exception, match=r"No module named 'tests\.no_such_module'"):
        start_ranks(module, 2, backend=None).run("counts")
