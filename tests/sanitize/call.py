"""A call of a C++ op on numpy arrays, each of which ends where its allocation ends."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mxep import cpp_bindings
from mxep.core_kernels.launch import ArrayType, KernelOp
from mxep.core_kernels.registry import OPS

from ..conformance.backends.cpp import POISON, exported, poisoned

CPP_OPS = {name: op for name, op in OPS.items() if name in cpp_bindings.ffi_targets()}
Array = np.ndarray


def require_numpy_alone() -> None:
    """Raise AssertionError if the process has a framework, whose allocator hides the ends of arrays."""
    assert not sys.modules.keys() & {"torch", "jax"}


def types_of(arrays: Sequence[Array]) -> list[ArrayType]:
    return [ArrayType(x.shape, x.dtype.name) for x in arrays]


def shifted(x: ArrayType, shift: int) -> Array:
    """An array filled with POISON; `shift` elements precede it, so that its address is no multiple of 16."""
    size = int(np.prod(x.shape))
    return poisoned(ArrayType((shift + size,), x.dtype), POISON)[shift:].reshape(x.shape)


def call(
    op: KernelOp, arrays: Sequence[Array], options: Mapping[str, Any], shift: int = 0, threads: int | None = None
) -> tuple[Array, ...]:
    """The outputs.

    Raises:
        ValueError: of the plan for a shape or an option, of C++ for a value; it begins with the name of the op.
        TypeError: of the plan.
    """
    inputs = op.complete(tuple(arrays), np.zeros(0, np.int32))
    signature = op.signature(*types_of(inputs), **options)
    copies = [shifted(x, shift) for x in types_of(inputs)]
    for copy, x in zip(copies, inputs, strict=True):
        copy.view(f"u{x.itemsize}")[...] = x.view(f"u{x.itemsize}")
    outputs = tuple(shifted(x, shift) for x in signature.out)
    attrs = list(signature.attrs.values())
    cpp_bindings.run(op.name, list(map(exported, copies)), list(map(exported, outputs)), attrs, threads)
    for copy, x in zip(copies, inputs, strict=True):
        assert copy.tobytes() == x.tobytes(), "an input was written"
    return outputs
