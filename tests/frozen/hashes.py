"""The hash of arrays: of their dtypes, shapes and bytes. A NaN has the hash of any NaN, as in tests/compare.py."""

import hashlib
from typing import Any

import numpy as np

from ..compare import to_numpy

DIGITS = 16
_CHUNK = 1 << 24
_INFINITY = {"bfloat16": 0x7F80, "float32": 0x7F800000}
"""The bits of infinity. NaN are the values with more."""


class Hash:
    """Of the arrays that were added, in order."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, array: Any) -> None:
        """array: of numpy, torch or JAX."""
        x = np.ascontiguousarray(to_numpy(array))
        self._sha.update(f"{x.dtype.name}{x.shape}".encode())
        flat = x.reshape(-1).view(f"u{x.itemsize}")
        for begin in range(0, flat.size, _CHUNK):
            part = flat[begin : begin + _CHUNK]
            if x.dtype.kind not in "iub":
                infinity = _INFINITY[x.dtype.name]
                nan = (part & flat.dtype.type((1 << (8 * x.itemsize - 1)) - 1)) > infinity
                part = np.where(nan, flat.dtype.type(infinity + 1), part) if nan.any() else part
            self._sha.update(part.data)

    @property
    def digits(self) -> str:
        return self._sha.hexdigest()[:DIGITS]


def digits_of(*arrays: Any) -> str:
    """The hash of all of them.

    >>> digits_of(np.zeros(2, np.float32)) == digits_of(np.zeros(2, np.int32))
    False
    """
    found = Hash()
    for array in arrays:
        found.add(array)
    return found.digits


def digits_of_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
