"""One bad argument per call of every public function: it raises an error of this package that names it, or
fuzz_returns.py says why it returns."""

import inspect
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mxep.jax_frontend import ops

from ... import bad_values
from ...may_return import by_argument, verdict
from .fuzz_returns import ROWS


@pytest.fixture(scope="module")
def calls() -> ModuleType:
    """Imported by the tests, not by every process that collects them."""
    from . import fuzz_calls

    return fuzz_calls


def described(value: Any) -> Any:
    """A value of the table, as `bad_values` takes it."""
    if isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        wide = np.float64 if jnp.issubdtype(value.dtype, jnp.floating) else np.int64
        return bad_values.Array(np.asarray(value).astype(wide), value.dtype.name)
    return value


def converted(value: Any) -> Any:
    if not isinstance(value, bad_values.Array):
        return value
    # What jax.numpy has without x64; a wider dtype comes as numpy's.
    wide = value.dtype in ("float64", "int64", "complex64")
    with np.errstate(all="ignore"):
        narrow = value.values.astype(value.dtype if wide else jnp.dtype(value.dtype))
    return narrow if wide else jnp.asarray(narrow)


def run(function: Any, given: dict[str, Any], eager: bool) -> None:
    """Call and wait for the result, or trace alone, which knows no values and compiles nothing."""

    def call() -> list[jax.Array]:
        result = function(**given)
        if isinstance(result, AbstractContextManager):
            with result:
                return []
        return [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]

    jax.block_until_ready(call()) if eager else jax.make_jaxpr(call)()


def of_kernel(error: Exception) -> Exception:
    """What a C++ kernel says of a value comes through XLA."""
    said = str(error)
    return ValueError(said.removeprefix("INVALID_ARGUMENT: ")) if said.startswith("INVALID_ARGUMENT: ") else error


OVER_MESHES = ("moe.sharded_apply", "sharded_dense")
"""Programs over a mesh take seconds to compile."""


def fuzz(calls: ModuleType, cases: list[bad_values.Case]) -> list[str]:
    """The calls that neither return nor raise as they should, with what is wrong.

    Arrays of bad values are looked at, so those calls run; a size of 2^31 - 1 is valid, and traced alone, as is a layer
    over a mesh, which takes seconds to compile.
    """
    failures = []
    arguments = [f"{name}.{key}" for name, given in calls.CALLS.items() for key in given]
    listed = by_argument(ROWS, arguments)
    for case in cases:
        returned, why = True, ""
        values = case.bad.kind == "value" and isinstance(case.bad.value, bad_values.Array)
        try:
            given = {**calls.CALLS[case.call], case.argument: converted(case.bad.value)}
            run(calls.function(case.call), given, values and case.call not in OVER_MESHES)
        except Exception as error:
            returned, why = False, bad_values.complaint(of_kernel(error), calls.NAMES, calls.PARAMETERS)
        if why := why or verdict(listed, case, returned):
            failures.append(f"{case}: {why}")
    return failures


def test_the_table_has_every_function_and_argument(calls: ModuleType) -> None:
    public = {name for name, value in calls.IMPORTABLE.items() if callable(value)} - calls.RECORDS
    assert public | {f"ops.{name}" for name in ops.OPS} <= set(calls.CALLS)
    for name, given in calls.CALLS.items():
        function = calls.function(name)
        assert set(given) == set(inspect.signature(function).parameters), name
        run(function, given, eager=False)


@pytest.mark.parametrize(
    ("of_ops", "number"),
    [
        (False, 200),
        pytest.param(False, 10**6, marks=pytest.mark.slow),
        (True, 150),
        pytest.param(True, 400, marks=pytest.mark.slow),
    ],
    ids=["public", "public all", "ops", "ops more"],
)
def test_a_bad_argument_is_named_or_listed(calls: ModuleType, of_ops: bool, number: int) -> None:
    """Some of each public function and of each op; slow: every one of the public functions, and more of the ops."""
    table = {
        name: {key: described(value) for key, value in given.items()}
        for name, given in calls.CALLS.items()
        if name.startswith("ops.") == of_ops
    }
    wrong = fuzz(calls, bad_values.draw(table, number, seed=0))
    assert not wrong, "\n".join(wrong)
