"""Blockwise FP8: scales and products of known values."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.cases import BF16, seeded
from mxep.core_kernels.formats import SQUARE
from mxep.core_kernels.grouped_gemm.blockwise import oracle as oracle_blockwise

from .. import check

Ops = Mapping[str, Callable]
needs = pytest.mark.needs
powers_of_two = pytest.mark.parametrize("power_of_two", [False, True])
out_dtypes = pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])

# --- quantization ---------------------------------------------------------------------------------------


def test_scales_and_bytes_of_known_values(ops: Ops) -> None:
    """amax / 448, or the power of two at or above it; the smallest scale for zeros; NaN of one block alone."""
    x = np.zeros((2, 3 * SQUARE), np.float32)
    x[0, 0], x[0, 130], x[1, 300] = -672, 449, np.nan
    q, sf = ops["quantize_blockwise"](x)
    smallest = np.float32(2.0**-126)
    np.testing.assert_array_equal(
        sf, np.float32([[1.5, np.float32(449) / 448, smallest], [smallest, smallest, np.nan]])
    )
    assert (q[0, 0], q[0, 130], q[0, 1]) == (0xFE, 0x7E, 0)
    assert (q[1, : 2 * SQUARE] == 0).all()
    assert (q[1, 2 * SQUARE :] == 0x7F).all()
    _, powers = ops["quantize_blockwise"](x, power_of_two=True)
    np.testing.assert_array_equal(powers, np.float32([[2, 2, smallest], [smallest, smallest, np.nan]]))


@powers_of_two
def test_a_transposed_matrix_has_the_transposed_bytes(ops: Ops, power_of_two: bool) -> None:
    x = seeded("transposed").standard_normal((2, 160, 288)).astype(BF16)
    both = ops["quantize_squares_both"](x, power_of_two=power_of_two)
    check.same_bytes(ops["quantize_squares"](x, power_of_two=power_of_two), both[:2])
    transposed = np.ascontiguousarray(np.swapaxes(x, 1, 2))
    check.same_bytes(ops["quantize_squares"](transposed, power_of_two=power_of_two), both[2:])


# --- the product ----------------------------------------------------------------------------------------


@needs("grouped_mm_blockwise")
def test_every_block_has_its_own_scale(ops: Ops) -> None:
    """Products of ones under powers of two that tell rows, spans of K, columns and groups apart: exact. Two rows of
    squares in each group, the last ragged; the last span of K is ragged; rows past the last end are NaN."""
    m, n, k, ends = 140, 264, 416, np.int32([70, 70, 135])
    lhs_q, rhs_q = np.full((m, k), 0x38, np.uint8), np.full((3, n, k), 0x38, np.uint8)
    rng = seeded("own scale")
    lhs_sf, rhs_sf = (np.exp2(rng.integers(-4, 4, shape)).astype(np.float32) for shape in ((m, 4), (3, 3, 4)))
    lhs_q[ends[-1] :], lhs_sf[ends[-1] :], rhs_sf[1] = 0x7F, np.nan, np.nan
    got = ops["grouped_mm_blockwise"](lhs_q, lhs_sf, rhs_q, rhs_sf, ends, out_dtype="float32")
    check.same_bytes(got, oracle_blockwise.grouped_mm_blockwise(lhs_q, lhs_sf, rhs_q, rhs_sf, ends, "float32"))


@needs("grouped_mm_blockwise")
@out_dtypes
def test_sums_are_rounded_once(ops: Ops, out_dtype: str) -> None:
    """bf16 holds 258 and not 257: 16 * 16 and 1 of different spans, whose scales are exact."""
    lhs = np.zeros((3, 256), np.uint8)
    lhs[:, 0], lhs[:, 128] = 0x58, 0x38
    rhs = np.broadcast_to(lhs[0], (1, 8, 256)).copy()
    sf, squares = np.float32([[0.5, 2]] * 3), np.float32([[[2, 0.5]]])
    got = ops["grouped_mm_blockwise"](lhs, sf, rhs, squares, np.int32([3]), out_dtype=out_dtype)
    check.same_bytes(got, oracle_math.round_to(np.full((3, 8), 257.0), out_dtype))
