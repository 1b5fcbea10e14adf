"""The examples in the docstrings run; every public function has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch
from mxep import torch_frontend
from mxep.torch_frontend import ops

from ..public_names import importable, public_names

MODULES = [m.name for m in pkgutil.walk_packages(torch_frontend.__path__, "mxep.torch_frontend.") if not m.ispkg]
NAMES = importable(torch_frontend)
PUBLIC = {name: NAMES[name] for name in public_names(torch_frontend)}
"""The examples use the public names without importing them."""
SETTINGS = {"debug_checks", "force_implementation", "lower_for"}
"""They change how later calls run: an example has nothing to show."""


@pytest.mark.parametrize("module", MODULES, ids=lambda name: name.partition("_frontend.")[2])
def test_examples(module: str) -> None:
    source = importlib.import_module(module)
    results = doctest.testmod(source, extraglobs={n: v for n, v in PUBLIC.items() if n not in vars(source)})
    assert results.failed == 0


def test_every_public_function_has_an_example() -> None:
    functions = {name for name, value in NAMES.items() if inspect.isfunction(value)} - SETTINGS
    assert not {name for name in functions if ">>>" not in (NAMES[name].__doc__ or "")}


@pytest.mark.parametrize("name", ops.OPS)
def test_examples_of_ops(name: str) -> None:
    globs = {"ops": ops, "torch": torch}
    example = doctest.DocTestParser().get_doctest(getattr(ops, name).__doc__, globs, name, None, 0)
    results = doctest.DocTestRunner().run(example)
    assert results.failed == 0
    assert results.attempted > 0


def test_ops_have_signatures_and_documentation() -> None:
    for name, op in ops.OPS.items():
        function = getattr(ops, name)
        assert tuple(inspect.signature(function).parameters) == (*op.inputs, *op.options)
        assert all(argument in function.__doc__ for argument in (*op.inputs, *op.outputs, *op.options)), name
        assert all(word in function.__doc__ for word in ("Args:", "Returns:", "Raises:")), name
