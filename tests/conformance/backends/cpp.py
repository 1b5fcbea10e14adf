"""The C++ table without a framework: check, poisoned numpy outputs, run."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from mxep import cpp_bindings
from mxep.core_kernels.launch import ArrayType, KernelOp

from . import BYTES, KERNEL_OPS

POISONED = True
POISON = 0xA5
BF16 = np.dtype(ml_dtypes.bfloat16)
_BFLOAT, _CODE = 4, 20  # DLPack: kDLBfloat; the offset of dtype.code in a DLTensor

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Bf16:
    """A bf16 array as DLPack. numpy exports no ml_dtypes: this exports the bits as uint16 and then sets the type."""

    def __init__(self, x: np.ndarray) -> None:
        self._bits = x.view(np.uint16)

    def __dlpack__(self, **_: Any) -> object:
        capsule = self._bits.__dlpack__()
        ctypes.c_uint8.from_address(_pointer(capsule, b"dltensor") + _CODE).value = _BFLOAT
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._bits.__dlpack_device__()


def _exported(x: np.ndarray) -> Any:
    return _Bf16(x) if x.dtype == BF16 else x


def poisoned(out: ArrayType, byte: int) -> np.ndarray:
    """An array whose every byte is `byte`."""
    dtype = np.dtype(out.dtype)
    return np.full(int(np.prod(out.shape)) * dtype.itemsize, byte, np.uint8).view(dtype).reshape(out.shape)


def run(op: KernelOp, *inputs: np.ndarray, poison: int = POISON, **options: Any) -> Any:
    inputs = op.complete(inputs, np.zeros(0, np.int32))
    signature = op.signature(*(ArrayType(x.shape, x.dtype.name) for x in inputs), **options)
    outputs = tuple(poisoned(out, poison) for out in signature.out)
    arrays = [_exported(np.array(x, order="C")) for x in inputs]  # a copy: cases are shared and may be read-only
    cpp_bindings.run(op.name, arrays, list(map(_exported, outputs)), list(signature.attrs.values()))
    return outputs if len(outputs) > 1 else outputs[0]


OPS: dict[str, Callable] = {name: partial(run, KERNEL_OPS[name]) for name in BYTES}
