"""The comparisons themselves: each one must be able to fail."""

import dataclasses

import numpy as np
import pytest
from mxep.core_kernels.cases import BF16
from mxep.core_kernels.grouped_gemm.cases import GEMMS
from mxep.core_kernels.grouped_gemm.exact import oracle

from . import check
from .layer.layers import FFN, LAYERS


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
    exact = oracle.grouped_mm_bf16(case.lhs, case.rhs_t, case.group_ends, "float64")
    check.m_grouped(exact.astype(dtype), case.lhs, case.rhs_t, case.group_ends)
    for wrong in (exact * (1 + 2.0**-7), np.where(exact == exact.max(), np.nan, exact), exact[::-1]):
        with pytest.raises(AssertionError):
            check.m_grouped(wrong.astype(dtype), case.lhs, case.rhs_t, case.group_ends)


@pytest.mark.parametrize(
    ("value", "expected", "shown"),
    [(1.5, np.nan, "1.5, expected nan"), (np.nan, 2.0, "nan, expected 2"), (-np.inf, np.inf, "-inf, expected inf")],
)
def test_a_nan_or_an_infinity_elsewhere_is_named_with_its_index(value: float, expected: float, shown: str) -> None:
    exact = np.arange(12.0).reshape(3, 4)
    exact[0, 1] = np.nan
    got = exact.astype(np.float32)
    check.gemm_bound(got, exact, np.abs(exact), 1)
    got[1, 2], exact[1, 2] = value, expected
    with pytest.raises(AssertionError) as caught:
        check.gemm_bound(got, exact, np.abs(exact), 1)
    assert str(caught.value) == f"1 of 12 values differ in NaN or infinity, the first at (1, 2): {shown}"


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
    short = oracle.grouped_mm_bf16(case.lhs[:, :-1], case.rhs_t[..., :-1], case.group_ends, "float32")
    with pytest.raises(AssertionError, match="over the bound"):
        check.m_grouped(short, case.lhs, case.rhs_t, case.group_ends)


def test_the_bound_is_wider_by_the_given_error_of_the_operands() -> None:
    case = GEMMS["normal"]
    exact = oracle.grouped_mm_bf16(case.lhs, case.rhs_t, case.group_ends, "float64")
    off = np.abs(exact) / 8
    check.gemm_bound((exact + off).astype(np.float32), exact, np.abs(exact), 1, operands=off)
    for wrong in (exact + 1.01 * off, exact - 1.01 * off):
        with pytest.raises(AssertionError, match="over the bound"):
            check.gemm_bound(wrong.astype(np.float32), exact, np.abs(exact), 1, operands=off)


def test_the_bound_is_half_an_ulp_of_bf16_and_none_of_fp32() -> None:
    """The exact value, 257 / 256, is halfway between two bf16 numbers; the sum of one term adds 2^-23 of it."""
    exact = np.float64([1 + 2.0**-8])
    check.gemm_bound(np.array([1], BF16), exact, exact, 1)
    check.gemm_bound(np.float32([1 + 2.0**-8 + 2.0**-23]), exact, exact, 1)
    for got in (np.array([1 - 2.0**-8], BF16), np.float32([1 + 2.0**-8 + 2.0**-22])):
        with pytest.raises(AssertionError, match="over the bound"):
            check.gemm_bound(got, exact, exact, 1)


def worst(got: dict[str, np.ndarray], want: dict[str, np.ndarray], rows: np.ndarray) -> float:
    return min(check.expert_db(got, want, rows).values())


@pytest.mark.parametrize("expert", [0, 5, 7])
@pytest.mark.parametrize("result", ["out", "x", "w1", "w3", "w2", "prob"])
def test_one_expert_of_eight_that_is_5_percent_off_fails(result: str, expert: int) -> None:
    want, rows = FFN.reference("mxfp8"), FFN.rows()
    assert worst(want, want, rows) == np.inf
    wrong = want[result].copy()
    part = expert if result in ("w1", "w3", "w2") else rows[expert]
    wrong[part] = (wrong[part].astype(np.float64) * 1.05).astype(wrong.dtype)
    assert worst(want | {result: wrong}, want, rows) < 27 < check.GPU_DB


@pytest.mark.parametrize("weight", ["w1", "w3", "w2"])
def test_a_weight_of_one_expert_that_is_5_percent_off_fails(weight: str) -> None:
    """In a feed-forward and in a layer, where an expert's output is one of two that a token sums."""
    ffn, layer = FFN, LAYERS["softmax"]
    scale = np.where(np.arange(8) == 3, np.float32(1.05), np.float32(1))[:, None, None]
    wrong = dataclasses.replace(ffn, weights=ffn.weights | {weight: ffn.weights[weight] * scale})
    assert worst(wrong.reference("mxfp8"), ffn.reference("mxfp8"), ffn.rows()) < 30 < check.GPU_DB
    wrong = dataclasses.replace(layer, params=layer.params | {weight: layer.params[weight] * scale})
    assert worst(wrong.reference("mxfp8"), layer.reference("mxfp8"), layer.rows()) < 30 < check.GPU_DB


@pytest.mark.parametrize("recipe", ["mxfp8_wgrad_with_hp", "fp8_rowwise", "bf16"])
def test_another_recipe_fails(recipe: str) -> None:
    """A fold is 86 dB off with these values and passes; the tests of the folding ops compare bytes."""
    want = FFN.reference("mxfp8")
    assert worst(FFN.reference(recipe), want, FFN.rows()) < check.CPU_DB
