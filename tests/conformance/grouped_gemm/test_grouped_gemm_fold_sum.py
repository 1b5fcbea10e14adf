"""The sum of two folded products: the error bound of tests/compare.py, and exact values where scales are far apart."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.grouped_gemm.folded import oracle as oracle_folded

from .. import check
from ..backends import INTERPRETER, offers
from ..cases import BF16, seeded
from .test_grouped_gemm_folded import M_GROUPED, by_row, out_dtypes

Ops = Mapping[str, Callable]
Array = np.ndarray
pytestmark = pytest.mark.needs("grouped_mm_fold_sum")


@out_dtypes
@pytest.mark.parametrize("name", M_GROUPED)
def test_a_sum_of_products(backend: str, ops: Ops, name: str, out_dtype: str) -> None:
    """The second product has its own depth. With fp32 its rows are 2^60 smaller and its weights 2^60 larger."""
    octaves = -60 if out_dtype == "float32" else 0
    case, ends, rng = M_GROUPED[name], M_GROUPED[name].group_ends, seeded(f"sum {name}")
    (groups, n, k), depth = case.rhs_t.shape, 3 * BLOCK
    lhs2 = (rng.standard_normal((len(case.lhs), depth)) * 2.0**octaves * np.sqrt(k / depth)).astype(BF16)
    rhs2 = (rng.standard_normal((groups, n, depth)) * 2.0**-octaves).astype(BF16)
    operands = *by_row(case.lhs), *by_row(case.rhs_t), *by_row(lhs2), *by_row(rhs2)
    got = ops["grouped_mm_fold_sum"](*operands, ends, out_dtype=out_dtype)
    assert got.dtype == oracle_math.DTYPES[out_dtype]
    exact = oracle_folded.grouped_mm_fold_sum(*operands, ends, "float64")
    magnitudes = [x if i % 2 else x & 0x7F for i, x in enumerate(operands)]
    magnitude = oracle_folded.grouped_mm_fold_sum(*magnitudes, ends, "float64")
    check.gemm_bound(got, exact, magnitude, k + depth, check.fp8_chain(backend))
    check.fp8_sums(backend, "grouped_mm_fold_sum", got, *operands, ends)
    assert (got[ends[-1] :] == 0).all()


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
