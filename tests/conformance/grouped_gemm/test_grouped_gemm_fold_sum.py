"""The sum of two folded products: exact values where scales are far apart."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.cases import seeded
from mxep.core_kernels.grouped_gemm.folded import oracle as oracle_folded

from ..backends import INTERPRETER, offers
from .test_grouped_gemm_folded import out_dtypes

Ops = Mapping[str, Callable]
Array = np.ndarray
pytestmark = pytest.mark.needs("grouped_mm_fold_sum")


def single_terms(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Codes of rows with one term that may be non-zero: 0, 1, 1.5 or -1.25."""
    codes = np.zeros(shape, np.uint8)
    codes[..., 5] = rng.choice(np.uint8([0, 0x38, 0x3C, 0xBA]), shape[:-1])
    return codes


@out_dtypes
@pytest.mark.parametrize("spread", [20, 45, 50])
def test_scales_of_both_products_are_independent(ops: Ops, spread: int, out_dtype: str) -> None:
    """Each product has one term, which is often zero: the sum is exact before it is rounded.

    Exponents of rows and of columns differ between the GEMMs by up to twice the spread each. The sm_90 kernel has
    three paths: differences up to 40, larger ones, and sums of a row's and a column's difference above 96.
    """
    rng = seeded(f"units {spread}")
    m, n = (136, 72) if INTERPRETER else (600, 264)  # several tiles of either
    depths = 160, 96
    operands = []
    for depth in depths:
        for shape in ((m, depth), (1, n, depth)):
            operands += [single_terms(rng, shape), rng.integers(127 - spread, 128 + spread, shape[:-1], np.uint8)]
    ends = np.int32([m - 8])
    got = ops["grouped_mm_fold_sum"](*operands, ends, out_dtype=out_dtype)
    want = oracle_folded.grouped_mm_fold_sum(*operands, ends, out_dtype)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("byte", [0, 1, 254, 255])
def test_extreme_scales_of_one_product(backend: str, ops: Ops, byte: int) -> None:
    """A row of the first GEMM, then of the second, with an extreme scale, and columns whose scales make up for it.
    XLA's matmul on a CPU reads subnormal operands as zeros."""
    one = np.full((1, 32), 0x38, np.uint8)
    w, other = one[None].repeat(8, 1), np.full((1, 8), 127, np.uint8)
    far = np.full((1, 8), 254 - min(byte, 254), np.uint8)
    extreme, plain = (one, np.uint8([byte]), w, far), (one, np.uint8([127]), w, other)
    want = np.nan if byte == 255 else 32 if byte in (0, 254) and offers(backend, "FLUSHES_SUBNORMALS") else 64
    for operands in ((*extreme, *plain), (*plain, *extreme)):
        got = ops["grouped_mm_fold_sum"](*operands, np.int32([1]), out_dtype="float32")
        np.testing.assert_array_equal(got, np.full((1, 8), want, np.float32))


def test_one_nan_stays_in_its_row_and_column(ops: Ops) -> None:
    one = np.full((3, 32), 0x38, np.uint8)
    w, sf, w_sf = np.full((1, 16, 32), 0x38, np.uint8), np.full(3, 127, np.uint8), np.full((1, 16), 127, np.uint8)
    bad_rows, bad_w = one.copy(), w.copy()
    bad_rows[1, 3], bad_w[0, 9, 31] = 0x7F, 0xFF
    want = np.full((3, 16), 64, np.float32)
    want[1], want[:, 9] = np.nan, np.nan
    for operands in ((bad_rows, sf, bad_w, w_sf, one, sf, w, w_sf), (one, sf, w, w_sf, bad_rows, sf, bad_w, w_sf)):
        got = ops["grouped_mm_fold_sum"](*operands, np.int32([3]), out_dtype="float32")
        np.testing.assert_array_equal(got, want)
