"""Triton's interpreter, through the torch frontend's launcher, on poisoned outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from mxep.core_kernels.launch import KernelOp
from mxep.torch_frontend import force_implementation
from mxep.torch_frontend.ops import call
from mxep.torch_frontend.ops.launch import Outputs

from ...compare import to_numpy
from . import KERNEL_OPS
from .arrays import poisoned, to_torch

POISONED = True
POISON = 0xA5


def run(op: KernelOp, *inputs: np.ndarray, poison: int = POISON, **options: Any) -> Any:
    def allocate(outputs: Outputs, index: None) -> tuple[Any, ...]:
        return tuple(poisoned(s, d, poison) for s, d in zip(outputs.shapes, outputs.dtypes, strict=True))

    quiet = np.errstate(all="ignore")  # the interpreter is numpy, and overflow is among the cases
    with mock.patch.object(call, "allocate", allocate), force_implementation("triton"), quiet:
        results = tuple(map(to_numpy, call.call(op, *map(to_torch, inputs), **options)))
    return results if len(results) > 1 else results[0]


OPS: dict[str, Callable] = {name: partial(run, op) for name, op in KERNEL_OPS.items()}
