"""Adapters: one module per way to run the ops. README.md lists the functions of an adapter.

| adapter | what runs | process |
| --- | --- | --- |
| cpp | `cpp_bindings.run`, on outputs filled with a poison byte | normal |
| triton | Triton's interpreter, through the torch frontend's launcher; outputs are poisoned too | TRITON_INTERPRET=1 |
| torch | the public functions of `mxep.torch_frontend`, on the GPU where there is one | normal |
| jax | the public functions of `mxep.jax_frontend`, under `jax.jit` | normal |
| oracle | the definitions, with the option alone | normal |

`pytest tests/conformance --backend NAME` runs the cases with the adapter NAME: one of these, or a module of your own.
Without the option all adapters but oracle run that the process allows.
`python -m mxep.conformance tests.conformance.backends.NAME` prints a table of the cases.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from mxep.core_kernels.conformance import backend
from mxep.core_kernels.conformance.backend import Backend
from mxep.core_kernels.conformance.check import PRODUCTS
from mxep.core_kernels.conformance.runner import Runner
from mxep.core_kernels.registry import OPS as KERNEL_OPS

from ..layer.layers import LAYERS, RUNS

Array = np.ndarray

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
ADAPTERS = ("oracle", "cpp", "triton", "torch", "jax")
DEFAULT = ("triton",) if INTERPRETER else ("cpp", "torch", "jax")

BYTES = KERNEL_OPS.keys() - PRODUCTS


def adapter(name: str) -> Any:
    """The module of an adapter."""
    return import_module(f"{__name__}.{name}" if name in ADAPTERS else name)


@cache
def loaded(name: str) -> Backend:
    """An adapter as `python -m mxep.conformance` runs it."""
    return backend.of_module(name, adapter(name))


@cache
def runner(name: str) -> Runner:
    """Of an adapter's cases."""
    return Runner(loaded(name))


def offers(name: str, what: str) -> bool:
    """Whether an adapter has an op or one of the optional functions and marks."""
    return loaded(name).offers(what)


class Ops(Mapping[str, Callable]):
    """The ops of an adapter by name. A test that asks for an op that the adapter does not offer is skipped."""

    def __init__(self, name: str) -> None:
        self._name, self._ops = name, loaded(name).ops

    def __getitem__(self, op: str) -> Callable:
        if op not in self._ops:
            pytest.skip(f"{self._name} does not offer {op}")
        return self._ops[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)


@cache
def dense_layer(backend: str, name: str, run: str) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """y, statistics and gradients of a case of `LAYERS` on one rank."""
    case = LAYERS[name]
    return adapter(backend).moe(case.x, case.params, case.dy, RUNS[run], **case.options)
