"""The cases of all families by name, and one small call of every op.

Tests that go through all ops take these calls for the ops that they have no case of their own for.
"""

from typing import Any

import numpy as np
from mxep.core_kernels.cases import Case
from mxep.core_kernels.conformance.cases import TABLES
from mxep.core_kernels.conformance.check import PRODUCTS
from mxep.core_kernels.launch import ArrayType, KernelOp
from mxep.core_kernels.registry import OPS

__all__ = ["CASES", "FIRST", "OPS", "PRODUCTS", "TABLES", "sample", "sample_arrays"]
CASES: dict[str, Case] = {name: case for table in TABLES for name, case in table.CASES.items()}
FIRST = {case.op: case for case in reversed(CASES.values())}
"""The first case of each op."""


def sample_arrays(op: KernelOp) -> list[np.ndarray]:
    """The inputs of the op's first case, with 32 rows, all in groups where the results of others are unspecified, and
    without NaN and infinity: tests compare values."""

    def numbers(x: np.ndarray) -> np.ndarray:
        if x.dtype == np.uint8:
            return np.where(x & 0x7F == 0x7F, np.uint8(0x38), x)
        return x if x.dtype == np.int32 else np.where(np.isfinite(x), x, np.zeros((), x.dtype))

    arrays = list(map(numbers, op.complete(FIRST[op.name].arrays(0, 32), np.zeros(0, np.int32))))
    if op.rest_unspecified:
        arrays[op.inputs.index("group_ends")][-1] = 32
    return arrays


def sample(op: KernelOp) -> tuple[list[ArrayType], dict[str, Any]]:
    """Types and options of this call."""
    return [ArrayType(x.shape, x.dtype.name) for x in sample_arrays(op)], FIRST[op.name].options_of(32)
