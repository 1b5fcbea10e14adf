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


class _Exported:
    """An array as DLPack, in the form of torch: numpy exports no ml_dtypes, and an empty array has no address."""

    def __init__(self, x: np.ndarray) -> None:
        self._x, self._bf16 = (x.view(np.uint16) if x.dtype == BF16 else x), x.dtype == BF16

    def __dlpack__(self, **_: Any) -> object:
        capsule = self._x.__dlpack__()
        tensor = _pointer(capsule, b"dltensor")
        if self._bf16:
            ctypes.c_uint8.from_address(tensor + _CODE).value = _BFLOAT
        if not self._x.size:
            ctypes.c_void_p.from_address(tensor).value = None  # its first member, `data`
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._x.__dlpack_device__()


def exported(x: np.ndarray) -> Any:
    """The array itself if numpy exports it as torch does."""
    return _Exported(x) if x.dtype == BF16 or not x.size else x


def poisoned(out: ArrayType, byte: int) -> np.ndarray:
    """An array whose every byte is `byte`."""
    dtype = np.dtype(out.dtype)
    return np.full(int(np.prod(out.shape)) * dtype.itemsize, byte, np.uint8).view(dtype).reshape(out.shape)


def run(op: KernelOp, *inputs: np.ndarray, poison: int = POISON, **options: Any) -> Any:
    inputs = op.complete(inputs, np.zeros(0, np.int32))
    signature = op.signature(*(ArrayType(x.shape, x.dtype.name) for x in inputs), **options)
    outputs = tuple(poisoned(out, poison) for out in signature.out)
    arrays = [exported(np.array(x, order="C")) for x in inputs]  # a copy: cases are shared and may be read-only
    cpp_bindings.run(op.name, arrays, list(map(exported, outputs)), list(signature.attrs.values()))
    return outputs if len(outputs) > 1 else outputs[0]


OPS: dict[str, Callable] = {name: partial(run, KERNEL_OPS[name]) for name in BYTES}
