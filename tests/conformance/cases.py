"""The cases of a file on every backend: exact bytes, or the error bound of a sum.

A family has its files test_cases*.py, because a file runs on one worker. Each has a table `CASES` and one test, of the
arguments `backend` and `name`. A case's backends follow each other, so that its definition is computed once.

On a CPU torch and jax call the C++ function that the adapter cpp calls. It has every case; they have one of each kind
that differs for a framework: dtypes, numbers of dims, empty arrays, options. The others are slow.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from mxep.core_kernels.cases import Case
from mxep.core_kernels.conformance import pytest_plugin

from ..cases import PRODUCTS
from . import backends, check


def marks(case: Case) -> list[pytest.MarkDecorator]:
    composed = [pytest.mark.composed(case.op, *case.options_of())] if backends.KERNEL_OPS[case.op].compose else []
    return [pytest.mark.needs(case.op), *composed]


def slow(table: Mapping[str, Case]) -> set[str]:
    """Names of cases: a product in bf16 is the fp32 product, rounded. The first case of an op is enough."""
    rounded: dict[str, list[str]] = {}
    for name, case in table.items():
        if case.op in PRODUCTS and case.options_of().get("out_dtype") == "bfloat16":
            rounded.setdefault(case.op, []).append(name)
    return {name for names in rounded.values() for name in names[1:]}


def kind(case: Case) -> Any:
    """What a framework passes to a C++ function, but for sizes and values."""
    arrays = case.make(np.random.default_rng(0), 96)
    options = sorted((name, repr(value)) for name, value in case.options_of().items())
    return case.op, *((x.ndim, x.dtype.name, x.size > 0) for x in arrays), *options


def of_another_kind(table: Mapping[str, Case]) -> set[str]:
    """The first case of each kind, and all grouped products."""
    first: dict[Any, str] = {}
    for name, case in table.items():
        first.setdefault(name if case.op in PRODUCTS else kind(case), name)
    return set(first.values())


def parametrize(metafunc: pytest.Metafunc, names: Iterable[str], table: Mapping[str, Case]) -> None:
    """Every case on the backends `names`, case by case."""
    repeated, different = slow(table), of_another_kind(table)
    on_cpu = {name for name in ("torch", "jax") if name in names and not backends.offers(name, "FP8_TENSOR_CORES")}

    def is_slow(backend: str, name: str) -> bool:
        return name in repeated or (backend in on_cpu and "cpp" in names and name not in different)

    parameters = [
        pytest.param(backend, name, marks=[*marks(case), *([pytest.mark.slow] if is_slow(backend, name) else [])])
        for name, case in table.items()
        for backend in names
    ]
    metafunc.parametrize(("backend", "name"), parameters)


def compare(backend: str, case: Case) -> None:
    """Assert that the backend's op returns what the case's definition returns."""
    pytest_plugin.compare(backends.runner(backend), check.definition(case))
