"""The tables have every pair, and are small."""

import pytest

from .table import JAX, JAX_OFTEN, ON_GPUS, TORCH, Factors, all_rows, allowed, name_of, pairs_of, pairwise


@pytest.mark.parametrize("factors", [TORCH, ON_GPUS, JAX, JAX_OFTEN], ids=["torch", "GPUs", "jax", "jax often"])
def test_each_pair_is_in_a_row(factors: Factors) -> None:
    rows, every = pairwise(factors, allowed), all_rows(factors, allowed)
    assert {pair for row in rows for pair in pairs_of(row)} == {pair for row in every for pair in pairs_of(row)}
    assert all(map(allowed, rows))
    assert len({name_of(row) for row in rows}) == len(rows)
    # No table is smaller than its two largest factors have pairs.
    sizes = sorted(map(len, factors.values()))
    assert sizes[-1] * sizes[-2] <= len(rows) <= 1.3 * sizes[-1] * sizes[-2]


def test_a_pair_that_no_row_may_have_is_not_asked_for() -> None:
    factors = {"a": ("1", "2"), "b": ("1", "2"), "c": ("1", "2")}
    rows = pairwise(factors, lambda row: row["a"] != row["b"])
    assert [tuple(row.values()) for row in rows] == [("1", "2", "1"), ("1", "2", "2"), ("2", "1", "1"), ("2", "1", "2")]
