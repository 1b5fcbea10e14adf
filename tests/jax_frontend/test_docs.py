"""The examples in the docstrings run; every public function has one."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import get_args, get_origin

import jax
import jax.numpy as jnp
import pytest
from mxep import jax_frontend
from mxep.jax_frontend import ops

from ..public_names import importable, public_names

MODULES = [m.name for m in pkgutil.walk_packages(jax_frontend.__path__, "mxep.jax_frontend.") if not m.ispkg]
NAMES = importable(jax_frontend)
PUBLIC = {name: NAMES[name] for name in public_names(jax_frontend)}
"""The examples use the public names without importing them."""
SETTINGS = {"debug_checks", "force_implementation", "lower_for"}
"""They change how later calls run: an example has nothing to show."""


@pytest.mark.parametrize("module", MODULES, ids=lambda name: name.partition("_frontend.")[2])
def test_examples(module: str) -> None:
    source = importlib.import_module(module)
    given = {"jnp": jnp} | PUBLIC
    results = doctest.testmod(source, extraglobs={n: v for n, v in given.items() if n not in vars(source)})
    assert results.failed == 0


def test_every_public_function_has_an_example() -> None:
    functions = {name for name, value in NAMES.items() if inspect.isfunction(value)} - SETTINGS
    assert not {name for name in functions if ">>>" not in (NAMES[name].__doc__ or "")}


LAYERS = {f"moe.{name}": getattr(jax_frontend.moe, name) for name in ("apply", "sharded_apply")}


@pytest.mark.parametrize("name", sorted([*(n for n, f in NAMES.items() if inspect.isfunction(f)), *LAYERS]))
def test_annotations_show_the_dims_of_arrays(name: str) -> None:
    """An array parameter is `Float[Array, "M K"]`, not an array of any shape; so is a result."""
    signature = inspect.signature((NAMES | LAYERS)[name])
    shown = [p.annotation for p in signature.parameters.values()] + [signature.return_annotation]
    one = [a for a in shown if get_origin(a) not in (dict, Mapping)]  # packed weights by name have several shapes
    assert not [a for a in one if a is jax.Array or jax.Array in get_args(a)]
    assert not [a for a in shown if isinstance(a, str)], "read by help() as they are written"


def test_dims_are_shown_as_jaxtyping_writes_them() -> None:
    parameters = inspect.signature(jax_frontend.grouped_mm).parameters
    assert str(parameters["x"]) == 'x: Float[Array, "M K"] | MXArray'
    assert str(parameters["group_ends"]) == 'group_ends: Int[Array, "G"] | RowMap | LaidOut | None = None'


@pytest.mark.parametrize("name", ops.OPS)
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
        assert all(word in function.__doc__ for word in ("Args:", "Returns:", "Raises:")), name
