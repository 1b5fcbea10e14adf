"""The grouped products of bf16 and MXFP8 operands: what a group reads, and scales that a dtype cannot hold."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.cases import BF16
from mxep.core_kernels.grouped_gemm.cases import GEMMS
from mxep.core_kernels.quantize import oracle

from .. import check
from ..backends import offers

Ops = Mapping[str, Callable]
needs = pytest.mark.needs


def values(pair: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    return oracle.dequantize(*pair, "float64")


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
    case = GEMMS["normal"]
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
