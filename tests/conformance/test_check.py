"""The comparisons themselves: each one must be able to fail."""

import numpy as np
import pytest

from . import check
from .cases import BF16, GEMMS


def test_same_bytes_sees_a_bit_a_sign_a_dtype_and_a_nan() -> None:
    x = np.zeros(4, np.float32)
    check.same_bytes(x, x.copy())
    nan = np.float32([np.nan, 0, 0, 0])
    check.same_bytes(nan, -nan + 0 * x)
    for other in (-x, x.astype(np.float64), x[:3], nan, x + np.float32(1e-45)):
        with pytest.raises(AssertionError):
            check.same_bytes(other, x)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
def test_the_bound_is_a_bound(dtype: np.dtype) -> None:
    case = GEMMS["normal"]
    exact = check.oracle.grouped_mm_bf16(case.lhs, case.rhs_t, case.group_ends, "float64")
    check.m_grouped(exact.astype(dtype), case.lhs, case.rhs_t, case.group_ends)
    for wrong in (exact * (1 + 2.0**-7), np.where(exact == exact.max(), np.nan, exact), exact[::-1]):
        with pytest.raises(AssertionError):
            check.m_grouped(wrong.astype(dtype), case.lhs, case.rhs_t, case.group_ends)


def test_a_bf16_sum_is_outside_the_bound() -> None:
    """Accumulating in bf16 instead of fp32 must not pass."""
    case = GEMMS["normal"]
    out = np.zeros((96, 64), BF16)
    for k in range(case.lhs.shape[1]):
        rhs = case.rhs_t[:, :, k].astype(np.float32)
        term = np.concatenate([case.lhs[:64, k : k + 1] * rhs[0], case.lhs[64:, k : k + 1] * rhs[1]])
        out = (out.astype(np.float32) + term).astype(BF16)
    with pytest.raises(AssertionError, match="over the bound"):
        check.m_grouped(out, case.lhs, case.rhs_t, case.group_ends)


def test_a_missing_block_is_outside_the_bound() -> None:
    case = GEMMS["normal"]
    short = check.oracle.grouped_mm_bf16(case.lhs[:, :-1], case.rhs_t[..., :-1], case.group_ends, "float32")
    with pytest.raises(AssertionError, match="over the bound"):
        check.m_grouped(short, case.lhs, case.rhs_t, case.group_ends)


def test_the_bound_lets_other_operands_be_off_by_as_much_as_it_is_told() -> None:
    case = GEMMS["normal"]
    exact = check.oracle.grouped_mm_bf16(case.lhs, case.rhs_t, case.group_ends, "float64")
    off = np.abs(exact) / 8
    check.gemm_bound((exact + off).astype(np.float32), exact, np.abs(exact), 1, operands=off)
    for wrong in (exact + 1.01 * off, exact - 1.01 * off):
        with pytest.raises(AssertionError, match="over the bound"):
            check.gemm_bound(wrong.astype(np.float32), exact, np.abs(exact), 1, operands=off)
