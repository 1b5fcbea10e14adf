"""The f16 arithmetic of fold/code_tile.cuh in numpy, whose products are rounded once, against the definition: all codes
and differences of scales."""

import re
from pathlib import Path

import numpy as np
import pytest
from mxep.core_kernels.formats import Rounding
from mxep.core_kernels.oracle_math import E4M3_VALUES, e8m0_value, round_to, scale_byte, to_e4m3

HEADER = (Path(__file__).parents[3] / "core_kernels/fold/code_tile.cuh").read_text()
FOUND = {name: int(value.rstrip("u"), 0) for name, value in re.findall(r"\b(k\w+) = (\w+)[,;]", HEADER)}
SMALLEST = np.uint32(FOUND["kSmallestMaximum"]).view(np.float32)
LIMIT = np.uint16(FOUND["kLargestCode"] & 0xFFFF).view(np.float16)
FINITE = ~np.isnan(E4M3_VALUES)
FOLDS = (*range(36), 100, 254)  # how far a row's scale byte is below the scale that it is folded to
DOWN = np.arange(256)  # how far a row's scale byte is below the largest one of its block


def power(exponent):
    with np.errstate(over="ignore"):
        return np.ldexp(1.0, exponent).astype(np.float16)


P = E4M3_VALUES.astype(np.float16)[:, None] * power(np.maximum(-DOWN, -32) + 7)
VALUES = E4M3_VALUES[:, None] * np.ldexp(1.0, -DOWN)  # where the largest scale is 1


def exponents(rounding):
    bits = np.abs(P[FINITE]).astype(np.float32).view(np.uint32).astype(np.int64)
    return (bits + (0x1FFFFF if rounding is Rounding.RCEIL else 0)) >> 23


def test_a_large_maximum_is_exact() -> None:
    exact = np.abs(VALUES) * 128
    large = (np.abs(P) >= SMALLEST) | (exact >= SMALLEST)
    np.testing.assert_array_equal(np.abs(P)[large], exact[large])


@pytest.mark.parametrize("rounding", list(Rounding))
def test_scales(rounding) -> None:
    for largest in range(FOUND["kLargestRow"] + 1):
        column, row = exponents(rounding) + largest - 142, largest - DOWN
        used = (np.abs(P[FINITE]) >= SMALLEST) & (column >= FOUND["kSmallestColumn"]) & (row >= 0)
        x = round_to(E4M3_VALUES[FINITE, None] * np.ldexp(1.0, row - 127), "bfloat16")
        want = scale_byte(np.abs(x.astype(np.float32)), rounding)
        np.testing.assert_array_equal(column[used], want[used])


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("folds", [(0, 1, 7, 15, 16, 24, 35, 254), pytest.param(FOLDS, marks=pytest.mark.slow)])
def test_codes(rounding, folds) -> None:
    maxima, finite = np.abs(P[FINITE]), np.abs(VALUES[FINITE])
    found = exponents(rounding)
    for exponent in np.unique(found[maxima >= SMALLEST]):
        inside = np.abs(VALUES) <= finite[(found == exponent) & (maxima >= SMALLEST)].max()
        q = P[inside] * power(120 - exponent)
        if rounding is Rounding.FLOOR:
            q = np.clip(q, -LIMIT, LIMIT)
        codes = to_e4m3(VALUES[inside] / np.ldexp(1.0, exponent - 142))
        np.testing.assert_array_equal(q.astype(np.float64), E4M3_VALUES[codes] * 2.0**-15)
        for above in folds:
            folded = to_e4m3((q * power(max(-above, -32) + 15)).astype(np.float64))
            np.testing.assert_array_equal(folded, to_e4m3(E4M3_VALUES[codes] * np.ldexp(1.0, -above)))


def test_bf16_values() -> None:
    """The rounding to bf16 changes no code of the columns that the arithmetic takes."""
    for row in range(FOUND["kLargestRow"] + 1):
        exact = E4M3_VALUES[FINITE] * e8m0_value(np.uint8(row))
        x = round_to(exact, "bfloat16").astype(np.float64)
        if row >= 3:
            np.testing.assert_array_equal(x, exact)
        else:
            smallest = e8m0_value(np.uint8(FOUND["kSmallestColumn"]))
            np.testing.assert_array_equal(to_e4m3(x / smallest), to_e4m3(exact / smallest))
            assert not (to_e4m3(exact / smallest) & 0x7F).any()
