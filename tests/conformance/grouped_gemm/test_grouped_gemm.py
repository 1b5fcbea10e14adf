"""The grouped products of bf16 and MXFP8 operands, within the error bound of tests/compare.py.

The oracle quantizes the operands, so that the product alone is under test.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.quantize import oracle

from .. import check
from ..backends import offers
from ..cases import BF16, GEMMS, RAGGED_GEMMS, Gemm

Ops = Mapping[str, Callable]
M_GROUPED = GEMMS | RAGGED_GEMMS
needs = pytest.mark.needs
out_dtypes = pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])


def values(pair: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return oracle.dequantize(*pair, "float64")


@needs("grouped_mm_bf16")
@out_dtypes
@pytest.mark.parametrize("name", M_GROUPED)
def test_grouped_mm_bf16(ops: Ops, name: str, out_dtype: str) -> None:
    case = M_GROUPED[name]
    got = ops["grouped_mm_bf16"](case.lhs, case.rhs_t, case.group_ends, out_dtype=out_dtype)
    assert got.dtype == oracle_math.DTYPES[out_dtype]
    check.m_grouped(got, case.lhs, case.rhs_t, case.group_ends)
    assert (got[case.group_ends[-1] :] == 0).all()


@needs("grouped_mm_bf16_kn", "grouped_mm_bf16_kn_sum")
@out_dtypes
@pytest.mark.parametrize("name", M_GROUPED)
def test_weights_with_the_contraction_dim_first(ops: Ops, name: str, out_dtype: str) -> None:
    """One product, and the sum of two: the bound of a product of both contraction dims."""
    case, ends = M_GROUPED[name], M_GROUPED[name].group_ends
    rhs = np.ascontiguousarray(np.swapaxes(case.rhs_t, 1, 2))
    got = ops["grouped_mm_bf16_kn"](case.lhs, rhs, ends, out_dtype=out_dtype)
    assert got.dtype == oracle_math.DTYPES[out_dtype]
    check.m_grouped(got, case.lhs, case.rhs_t, ends)
    assert (got[ends[-1] :] == 0).all()
    lhs2, rhs2 = case.lhs[::-1].copy(), rhs[:, ::-1].copy()
    total = ops["grouped_mm_bf16_kn_sum"](case.lhs, rhs, lhs2, rhs2, ends, out_dtype=out_dtype)
    both = np.concatenate([case.lhs, lhs2], 1), np.concatenate([case.rhs_t, np.swapaxes(rhs2, 1, 2)], 2)
    assert total.dtype == got.dtype
    check.m_grouped(total, *both, ends)
    assert (total[ends[-1] :] == 0).all()


@needs("grouped_mm_mx")
@out_dtypes
@pytest.mark.parametrize("name", M_GROUPED)
def test_grouped_mm_mx(ops: Ops, name: str, out_dtype: str) -> None:
    case = M_GROUPED[name]
    lhs, rhs = oracle.quantize_row(case.lhs), oracle.quantize_row(case.rhs_t)
    got = ops["grouped_mm_mx"](*lhs, *rhs, case.group_ends, out_dtype=out_dtype)
    assert got.dtype == oracle_math.DTYPES[out_dtype]
    check.m_grouped(got, values(lhs), values(rhs), case.group_ends)
    assert (got[case.group_ends[-1] :] == 0).all()


@needs("grouped_wgrad_bf16")
@out_dtypes
@pytest.mark.parametrize("name", M_GROUPED)
def test_grouped_wgrad_bf16(ops: Ops, name: str, out_dtype: str) -> None:
    case = M_GROUPED[name]
    got = ops["grouped_wgrad_bf16"](case.dout, case.lhs, case.group_ends, out_dtype=out_dtype)
    assert got.dtype == oracle_math.DTYPES[out_dtype]
    check.k_grouped(got, case.dout, case.lhs, case.group_ends)
    assert (got[np.diff(case.group_ends, prepend=0) == 0] == 0).all()


@needs("grouped_wgrad_bf16_t")
@out_dtypes
@pytest.mark.parametrize("name", M_GROUPED)
def test_grouped_wgrad_bf16_t(ops: Ops, name: str, out_dtype: str) -> None:
    case = M_GROUPED[name]
    transposed = (np.ascontiguousarray(x.T) for x in (case.dout, case.lhs))
    got = ops["grouped_wgrad_bf16_t"](*transposed, case.group_ends, out_dtype=out_dtype)
    assert got.dtype == oracle_math.DTYPES[out_dtype]
    check.k_grouped(got, case.dout, case.lhs, case.group_ends)
    assert (got[np.diff(case.group_ends, prepend=0) == 0] == 0).all()


@needs("grouped_mm_bf16", "grouped_wgrad_bf16", "grouped_wgrad_bf16_t")
def test_no_group_reads_the_next_one(ops: Ops) -> None:
    """Operands are ones, and NaN in the next group; the ends are on both sides of the sizes of a tile."""
    ones = np.ones((168, 16), BF16)
    for end in (1, 7, 63, 64, 65, 128, 130):
        group_ends, tokens = np.int32([end, end, 160]), np.arange(168)[:, None]
        x = np.where(tokens < end, ones, BF16.type(np.nan))
        want = np.stack([np.full((16, 16), end), np.zeros((16, 16)), np.full((16, 16), np.nan)])
        for op, operand in (("grouped_wgrad_bf16", x), ("grouped_wgrad_bf16_t", np.ascontiguousarray(x.T))):
            got = ops[op](operand, operand, group_ends, out_dtype="float32")
            np.testing.assert_array_equal(got, want)
        weights = np.stack([ones[:8], np.full((8, 16), BF16.type(np.nan)), ones[:8]])
        got = ops["grouped_mm_bf16"](x, weights, group_ends, out_dtype="float32")
        want = np.where(tokens < end, 16.0, np.where(tokens < 160, np.nan, 0.0))
        np.testing.assert_array_equal(got, np.broadcast_to(want, (168, 8)))


@needs("grouped_mm_bf16_kn", "grouped_mm_bf16_kn_sum")
def test_no_stage_reads_the_next_group(ops: Ops) -> None:
    """A contraction dim of 40, and NaN in the weights of every other group."""
    ones = np.ones((3, 40, 16), BF16)
    ones[1] = np.nan
    x, ends = np.ones((96, 40), BF16), np.int32([40, 56, 90])
    row = np.arange(96)[:, None]
    want = np.where(row < 40, 40.0, np.where(row < 56, np.nan, np.where(row < 90, 40.0, 0.0)))
    want = np.broadcast_to(want, (96, 16))
    np.testing.assert_array_equal(ops["grouped_mm_bf16_kn"](x, ones, ends, out_dtype="float32"), want)
    total = ops["grouped_mm_bf16_kn_sum"](x, ones, x, ones, ends, out_dtype="float32")
    np.testing.assert_array_equal(total, 2 * want)


@needs("grouped_wgrad_mx")
@out_dtypes
@pytest.mark.parametrize("name", GEMMS)
def test_grouped_wgrad_mx(ops: Ops, name: str, out_dtype: str) -> None:
    case = GEMMS[name]
    lhs, rhs = oracle.quantize_col(case.dout), oracle.quantize_col(case.lhs)
    got = ops["grouped_wgrad_mx"](*lhs, *rhs, case.group_ends, out_dtype=out_dtype)
    assert got.dtype == oracle_math.DTYPES[out_dtype]
    check.k_grouped(got, values(lhs).T, values(rhs).T, case.group_ends)
    assert (got[np.diff(case.group_ends, prepend=0) == 0] == 0).all()


def with_scales(pair: tuple[np.ndarray, np.ndarray], shift: int) -> tuple[np.ndarray, np.ndarray]:
    """The pair times 2^shift, in the scale bytes."""
    return pair[0], (pair[1].astype(np.int32) + shift).astype(np.uint8)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, 0, x)


@needs("grouped_mm_mx")
def test_scales_that_one_dtype_cannot_hold_alone(backend: str, ops: Ops) -> None:
    """2^-126 times 2^110: operands that are subnormal numbers in fp32 and bf16 have a product that is not.

    XLA's matmul on a CPU reads subnormal operands as zeros. There the result is computed from the flushed operands.
    """
    case: Gemm = GEMMS["normal"]
    lhs, rhs = oracle.quantize_row(case.lhs), oracle.quantize_row(case.rhs_t)
    lhs, rhs = with_scales(lhs, -int(lhs[1].min())), with_scales(rhs, 110)
    got = ops["grouped_mm_mx"](*lhs, *rhs, case.group_ends, out_dtype="float32")
    assert (flushed(values(lhs)) != values(lhs)).any()
    if offers(backend, "FLUSHES_SUBNORMALS"):
        check.m_grouped(got, flushed(values(lhs)), values(rhs), case.group_ends)
        with pytest.raises(AssertionError, match="over the bound"):
            check.m_grouped(got, values(lhs), values(rhs), case.group_ends)
    else:
        check.m_grouped(got, values(lhs), values(rhs), case.group_ends)
