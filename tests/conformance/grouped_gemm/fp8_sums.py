"""E4M3 operands that tell the cuts of a tensor core apart, and the products of an H200.

    python -m tests.conformance.grouped_gemm.fp8_sums > tests/conformance/grouped_gemm/fp8_sums_sm90.json

on a Hopper GPU.

KINDS      name -> codes of a shape
RECORDED   name -> fp32 sums (ROWS, COLUMNS) of the operands of that name
"""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from mxep.core_kernels.cases import seeded

Array = np.ndarray
ROWS, COLUMNS, TERMS = 10, 8, 288  # two stages of 128 terms, and 32 of a third
FILE = Path(__file__).with_name("fp8_sums_sm90.json")


def _codes(x: Array) -> Array:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _every_code(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    magnitude, sign = rng.integers(0, 0x7F, shape), rng.integers(0, 2, shape)
    return (magnitude | sign << 7).astype(np.uint8)


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return _codes(rng.standard_normal(shape) * 60)


def _wide(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return _codes(rng.standard_normal(shape) * np.exp2(rng.integers(-9, 8, shape)))


def _positive(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Sums that grow past 14 bits."""
    return _codes(rng.random(shape) * 200)


def _subnormal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Below 2^-6, with a few values of 1."""
    return np.where(rng.random(shape) < 0.02, 0x38, rng.integers(0, 9, shape)).astype(np.uint8)


def _zeros_beside_the_largest(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """448 where the other operand, with the next parity of terms, is zero; the smallest values elsewhere."""
    term, odd = np.arange(shape[-1]), shape[0] == ROWS
    row = np.where(term % 16 == 5 + odd, 0x7E, np.where(term % 16 == 6 - odd, 0, 1 + term % 3))
    return np.broadcast_to(row, shape).astype(np.uint8) ^ (rng.integers(0, 2, shape) << 7).astype(np.uint8)


Kind = Callable[[np.random.Generator, tuple[int, ...]], Array]
KINDS: dict[str, Kind] = {
    "every_code": _every_code,
    "normal": _normal,
    "wide": _wide,
    "positive": _positive,
    "subnormal": _subnormal,
    "zeros_beside_the_largest": _zeros_beside_the_largest,
}


def operands(name: str, rows: int = ROWS, columns: int = COLUMNS, terms: int = TERMS) -> tuple[Array, Array]:
    """E4M3 bytes (rows, terms) and (columns, terms)."""
    rng = seeded(name)
    return KINDS[name](rng, (rows, terms)), KINDS[name](rng, (columns, terms))


def recorded() -> dict[str, Array]:
    """By kind: the sums (ROWS, COLUMNS) that an H200 gave."""
    lines = json.loads(FILE.read_text())
    return {name: np.array([int(x, 16) for x in words.split()], np.uint32).view(np.float32).reshape(ROWS, COLUMNS)
            for name, words in lines.items()}  # fmt: skip


def record() -> dict[str, str]:
    """By kind: the sums of the device as hexadecimal words."""
    from ..backends import torch

    one = np.full((1, ROWS), 127, np.uint8)
    lines = {}
    for name in KINDS:
        a, b = operands(name)
        arguments = a, one[0], b[None], one[:, :COLUMNS], np.int32([ROWS])
        got = torch.OPS["grouped_mm_fold"](*arguments, out_dtype="float32")
        lines[name] = " ".join(f"{word:08x}" for word in got.view(np.uint32).reshape(-1))
    return lines


if __name__ == "__main__":
    print(json.dumps(record(), indent=1))
