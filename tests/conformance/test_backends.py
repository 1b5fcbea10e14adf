"""The ops of each adapter; and every byte of every output is written."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from mxep.core_kernels.conformance.definitions import DEFINITIONS

from ..cases import FIRST, TABLES
from . import backends, check

HERE = Path(__file__).parent


def test_every_adapter_of_this_process_runs() -> None:
    expected = {"triton"} if os.environ.get("TRITON_INTERPRET") == "1" else {"cpp", "torch", "jax"}
    assert set(backends.DEFAULT) == expected


def test_an_adapter_has_ops_of_the_suite(backend: str) -> None:
    """Ours have all of them; the C++ table has no products: the frameworks multiply on a CPU."""
    offered = set(backends.adapter(backend).OPS)
    assert offered <= backends.KERNEL_OPS.keys(), "no such op"
    if backend in backends.ADAPTERS:
        assert offered == backends.BYTES | (set() if backend == "cpp" else backends.PRODUCTS)


def test_every_op_has_a_definition() -> None:
    assert backends.KERNEL_OPS.keys() <= DEFINITIONS.keys()


def test_every_case_is_in_one_file() -> None:
    files = [path.relative_to(HERE).with_suffix("").parts for path in HERE.glob("*/test_cases*.py")]
    modules = [import_module(".".join(("", *parts)), __package__) for parts in files]
    found = [name for module in modules for name in module.CASES]
    assert sorted(found) == sorted(name for table in TABLES for name in getattr(table, "CONFORMANCE", {}))


@pytest.mark.needs("POISONED")
@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.needs(op)) for op in sorted(FIRST)])
def test_every_specified_byte_of_every_output_is_written(ops: Mapping[str, Callable], op: str) -> None:
    """The result does not depend on the bytes of the outputs before the call: two poisons give the same bytes."""
    arrays = FIRST[op].arrays()
    run = partial(ops[op], *arrays, **FIRST[op].options_of())
    check.same_specified(op, arrays, run(poison=0x5A), run(poison=0xFF))
