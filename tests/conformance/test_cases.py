"""The cases of all families on every backend: exact bytes, or the error bound of a sum."""

from collections.abc import Callable, Mapping

import pytest

from ..cases import TABLES
from . import check
from .backends import KERNEL_OPS

CASES = {name: case for table in TABLES for name, case in getattr(table, "CONFORMANCE", {}).items()}


def marks(op: str, options: Mapping[str, object]) -> list[pytest.MarkDecorator]:
    composed = [pytest.mark.composed(op, *options)] if KERNEL_OPS[op].compose else []
    return [pytest.mark.needs(op), *composed]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(case.op, case.options_of())) for name, case in CASES.items()]
)
def test_case(backend: str, ops: Mapping[str, Callable], name: str) -> None:
    case = CASES[name]
    arrays = case.arrays()
    check.as_defined(backend, case, ops[case.op](*arrays, **case.options_of()), arrays)
