"""The numeric examples in the docstrings are right."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module", ["capabilities", "moe", "mx_array", "numerics", "ops", "ragged_dot", "vjp", "weights"]
)
def test_examples(module: str) -> None:
    source = importlib.import_module(f"mxep.jax_frontend.{module}")
    results = doctest.testmod(source)
    assert results.failed == 0
    assert results.attempted > 0
