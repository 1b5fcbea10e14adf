"""The numeric examples in the docstrings are right."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["autograd", "capabilities", "moe", "mx_tensor", "numerics"])
def test_examples(module: str) -> None:
    source = importlib.import_module(f"mxep.torch_frontend.{module}")
    results = doctest.testmod(source)
    assert results.failed == 0
    assert results.attempted > 0
