"""One adapter per way to run an op: `OPS`, from an op's name to a callable: arrays in the op's
order, options by keyword, numpy in and out.

| backend | what runs | process |
| --- | --- | --- |
| cpp | `cpp_bindings.run`, on outputs filled with a poison byte | normal |
| triton | the interpreter, through the torch frontend's launcher; outputs poisoned too | TRITON_INTERPRET=1 |
| torch | the public functions of `mxep.torch_frontend` | normal |
| jax | the public functions of `mxep.jax_frontend`, under `jax.jit` | normal |

A backend that cannot exist in a process is not collected there; `test_backends.py` says which must be. A third
party adds a module here with its own `OPS` and a line in `NAMES`.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

import numpy as np

from ..layers import LAYERS

Array = np.ndarray

INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ("triton",) if INTERPRETER else ("cpp", "torch", "jax")
POISONED = tuple(name for name in NAMES if name in ("cpp", "triton"))  # their ops take `poison`, a byte
FRONTENDS = ("torch", "jax")  # what test_end_to_end.py and test_expert_parallel.py need besides `OPS` is in these
GEMM_NAMES = tuple(name for name in NAMES if name != "cpp")  # on a CPU the frameworks multiply


def ops(backend: str) -> Mapping[str, Callable]:
    return import_module(f"{__name__}.{backend}").OPS


@cache
def dense_layer(frontend: str, name: str, run: str) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """y, statistics and gradients of a case of `LAYERS` on one rank."""
    case = LAYERS[name]
    module = import_module(f"{__name__}.{frontend}")
    return module.moe(case.x, case.params, case.dy, run, **case.options)
