"""The model of Hopper's FP8 tensor cores: the bytes that an H200 gave, and sums that are known.

test_fp8_sums.py compares it with the device.
"""

import numpy as np
import pytest
from mxep.core_kernels.grouped_gemm.folded import oracle as oracle_folded
from mxep.core_kernels.grouped_gemm.folded import oracle_sm90

from .. import check
from .fp8_sums import KINDS, operands, recorded

Array = np.ndarray
RECORDED = recorded()


def product(a: Array, b: Array, definition=oracle_sm90) -> Array:
    one = np.full(len(a), 127, np.uint8), np.full((1, len(b)), 127, np.uint8)
    return definition.grouped_mm_fold(a, one[0], b[None], one[1], np.int32([len(a)]), "float32")


@pytest.mark.parametrize("name", KINDS)
def test_the_bytes_of_an_h200(name: str) -> None:
    check.same_bytes(product(*operands(name)), RECORDED[name])


@pytest.mark.parametrize("name", [name for name in KINDS if name != "zeros_beside_the_largest"])
def test_each_kind_tells_cut_sums_from_exact_ones(name: str) -> None:
    assert (RECORDED[name] != product(*operands(name), oracle_folded)).mean() > 0.25


def dot(*pairs: tuple[int, int]) -> float:
    """The sum of up to 256 products of E4M3 codes."""
    codes = np.zeros((2, 256), np.uint8)
    codes[:, : len(pairs)] = np.transpose(pairs)
    return float(product(codes[:1].repeat(8, 0), codes[1:].repeat(8, 0))[0, 0])


ONE, SIXTEEN, LARGEST, SMALLEST, EIGHTH, ZERO, NAN = 0x38, 0x58, 0x7E, 0x01, 0x20, 0x00, 0x7F


def test_products_below_the_largest_are_cut_toward_zero() -> None:
    """In a sum with 2^14, products are cut to multiples of 2: 1 becomes 0 and 3.5 becomes 2, with either sign."""
    large = (0x78, 0x68)  # 2^8 2^6
    assert dot(large, (ONE, ONE)) == 2**14
    assert dot(large, (0xB8, ONE)) == 2**14
    assert dot(large, (0x3F, 0x3F)) == 2**14 + 2  # 1.875 squared
    assert dot(large, (0xBF, 0x3F)) == 2**14 - 2
    assert dot((ONE, ONE), (EIGHTH, ONE)) == 1.125


def test_a_zero_has_no_exponent() -> None:
    assert dot((ZERO, LARGEST), (SMALLEST, SMALLEST)) == 2.0**-18


def test_a_sum_keeps_14_bits_until_the_stage_ends() -> None:
    """32 products of 512, then 1 in the same stage or in the next."""
    full = [(0x60, SIXTEEN)] * 32
    rest = [(ZERO, ZERO)]
    assert dot(*full, (ONE, ONE)) == 2**14
    assert dot(*full, *rest * 96, (ONE, ONE)) == 2**14 + 1


def test_one_nan_is_enough() -> None:
    assert np.isnan(dot((NAN, ZERO), (ONE, ONE)))
