"""The numeric examples in the docstrings are right."""

import doctest
import importlib
import inspect

import jax.numpy as jnp
import pytest
from mxep.jax_frontend import ops


@pytest.mark.parametrize("module", ["capabilities", "moe", "mx_array", "numerics", "ragged_dot", "vjp", "weights"])
def test_examples(module: str) -> None:
    source = importlib.import_module(f"mxep.jax_frontend.{module}")
    results = doctest.testmod(source)
    assert results.failed == 0
    assert results.attempted > 0


@pytest.mark.parametrize("name", [name for name, op in ops.OPS.items() if ">>>" in op.doc])
def test_examples_of_ops(name: str) -> None:
    globs = {"ops": ops, "jnp": jnp}
    example = doctest.DocTestParser().get_doctest(getattr(ops, name).__doc__, globs, name, None, 0)
    results = doctest.DocTestRunner().run(example)
    assert results.failed == 0
    assert results.attempted > 0


def test_ops_have_signatures_and_documentation() -> None:
    for name, op in ops.OPS.items():
        function = getattr(ops, name)
        assert tuple(inspect.signature(function).parameters) == (*op.inputs, *op.options)
        assert all(argument in function.__doc__ for argument in (*op.inputs, *op.outputs, *op.options)), name
        assert all(word in function.__doc__ for word in ("Returns ", "Raises ")), name
