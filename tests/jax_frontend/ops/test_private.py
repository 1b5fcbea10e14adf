"""Private names of JAX: all in one file, and the same checks without any of them."""

import pkgutil
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from mxep.jax_frontend import grouped_mm
from mxep.jax_frontend.ops import checks, private

from ..references import normal

PACKAGE = Path(__file__).parents[3] / "jax_frontend"
SOURCE = PACKAGE / "ops/private.py"
NAMES = re.findall(r'_private\("([^"]+)"\)', SOURCE.read_text())
X, W = normal(64, 32), normal(2, 32, 32, seed=1)
GOOD, BAD = jnp.array([32, 64]), jnp.array([48, 32])
MESSAGE = r"grouped_mm: group_ends: got \[48 32\]; allowed: ends that do not decrease"


def without(hidden: str) -> Any:
    """A second copy of the module, on a JAX without one name."""
    resolve = pkgutil.resolve_name
    spec = spec_from_file_location("mxep.jax_frontend._jax_private_copy", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)

    def look_up(name: str) -> Any:
        if name == hidden:
            raise AttributeError(name)
        return resolve(name)

    with mock.patch.object(pkgutil, "resolve_name", look_up):
        spec.loader.exec_module(copy)
    return copy


def product(ends: jax.Array) -> jax.Array:
    return grouped_mm(X, W, ends)


def test_this_jax_has_the_names() -> None:
    assert len(NAMES) == 4
    assert private.has_checks


@pytest.mark.parametrize("hidden", NAMES)
def test_without_a_name_the_same_check_runs(hidden: str) -> None:
    copy = without(hidden)
    assert not copy.has_checks
    want = jax.jit(product)(GOOD)
    with mock.patch.object(checks, "check_later", copy.check_later):
        checked = checkify.checkify(jax.jit(lambda ends: product(ends)))
        error, got = checked(GOOD)
        assert error.get() is None
        np.testing.assert_array_equal(got, want)
        with pytest.raises(checkify.JaxRuntimeError, match=MESSAGE):
            checked(BAD)[0].throw()
        np.testing.assert_array_equal(jax.jit(lambda ends: product(ends))(GOOD), want)


def check_range(values: jax.Array) -> jax.Array:
    checks.check_values(values < 8, "op", "values", values, "allowed: below 8")
    return values


VALUES = jnp.zeros((300, 2), "uint8").at[200, 1].set(8).at[250].set(9)


@pytest.mark.parametrize("hidden", ["", *NAMES[:1]], ids=["private", "public"])
def test_the_first_wrong_value_and_its_index_are_reported(hidden: str) -> None:
    """Of two dims, of one, under vmap with the index of the batch, and of no value at all."""
    with mock.patch.object(checks, "check_later", without(hidden).check_later if hidden else private.check_later):
        checked = checkify.checkify(jax.jit(lambda values: check_range(values)))
        for values, where in ((VALUES, r"\(200, 1\)"), (VALUES[:, 1], "200")):
            message = rf"op: values: got 8 at index {where}; allowed: below 8"
            with pytest.raises(ValueError, match=message):
                check_range(values)
            with pytest.raises(checkify.JaxRuntimeError, match=message):
                checked(values)[0].throw()
        assert checked(VALUES[:200])[0].get() is None
        assert checked(VALUES[:0])[0].get() is None


def test_under_vmap_the_index_begins_with_the_batch() -> None:
    for dim, what in ((0, r"8 at index \(200, 1\)"), (1, r"9 at index \(0, 250\)")):
        error, _ = checkify.checkify(jax.vmap(check_range, dim))(VALUES)
        with pytest.raises(checkify.JaxRuntimeError, match=rf"op: values: got {what}; allowed: below 8"):
            error.throw()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_names_a_private_part_of_jax(path: Path) -> None:
    assert path == SOURCE or not re.search(r"\bjax\._src\b|from jax\S* import _|\bjax(\.\w+)*\._\w", path.read_text())
