"""The benchmark of models on two CPU ranks, at small sizes. The times mean nothing."""

import pytest

from ...ranks.fixture import Ranks, StartRanks
from . import step_ranks


@pytest.fixture(scope="module")
def two(start_ranks: StartRanks) -> Ranks:
    return start_ranks(step_ranks, 2)


@pytest.mark.slow
def test_lines_are_of_all_ranks(two: Ranks) -> None:
    rows, others = two.run("measured")
    assert others == []
    assert {row["case"]["candidate"] for row in rows} | {rows[0]["case"]["peer_is"]} == {
        "mxfp8", "recipe_bf16", "grouped_mm",
    }  # fmt: skip
    for row in rows:
        assert (row["case"]["gpus"], row["case"]["layers"], row["n"]) == (2, 2, 1)
        assert row["flops"] % (2 * 6 * step_ranks.BATCHES.tokens) == 0
        assert row["error"].get("loss", 0) < 1e-3


def test_sharded_training_is_training_of_one_process(two: Ranks) -> None:
    """Rank by rank, and with the tokens of both in one: weights are bf16, so that sums of gradients differ."""
    for sharded, one in two.run("trains_as_one_process"):
        assert one[-1] < one[0] - 0.05
        assert sharded == pytest.approx(one, rel=2e-3)
