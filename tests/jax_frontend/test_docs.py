"""The examples in the docstrings run; every public function has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
from mxep import jax_frontend

MODULES = [module.name for module in pkgutil.iter_modules(jax_frontend.__path__) if not module.name.startswith("_")]
NAMES = {name: getattr(jax_frontend, name) for name in jax_frontend.__all__}
"""The examples use the public names without importing them."""


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    source = importlib.import_module(f"mxep.jax_frontend.{module}")
    results = doctest.testmod(source, extraglobs={n: v for n, v in NAMES.items() if n not in vars(source)})
    assert results.failed == 0


SETTINGS = {"debug_checks", "force_implementation", "lower_for"}
"""They change how later calls run: an example has nothing to show."""


def test_every_public_function_has_an_example() -> None:
    functions = {name for name, value in NAMES.items() if inspect.isfunction(value)} - SETTINGS
    assert not {name for name in functions if ">>>" not in (NAMES[name].__doc__ or "")}
