"""fold_groups: exact bytes. Folded products: the error bound of tests/compare.py, and dB from the unfolded products.

The oracle quantizes and folds the operands, so that the product alone is under test.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.cases import seeded
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.fold.cases import SPANNED
from mxep.core_kernels.formats import BLOCK, SPAN
from mxep.core_kernels.grouped_gemm.exact import oracle as grouped_gemm_oracle
from mxep.core_kernels.grouped_gemm.folded import oracle as oracle_folded
from mxep.core_kernels.quantize import oracle as quantize_oracle

from .. import check
from ..backends import offers

Ops = Mapping[str, Callable]
Array = np.ndarray
Pair = tuple[Array, Array]
needs = pytest.mark.needs
out_dtypes = pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])

# --- fold_groups ------------------------------------------------------------------------------------


def test_fold_groups_are_independent(ops: Ops) -> None:
    """A first span has a spare factor of 8; a NaN block sets no scale; slots without a span are 0."""
    q = np.full((1, 14 * BLOCK), 0x38, np.uint8)  # 1.0
    first, second = [100, 102, *[255] * 6], [103, 110]
    sf = np.uint8([[*first, *second, 255, 180, 0, 200]])
    qf, span_sf = ops["fold_groups"](q, sf, np.int32([320, 320, 352, 416]))
    np.testing.assert_array_equal(span_sf, [[105], [110], [0], [0], [183]])
    codes = [0x10, 0x20, *[0x7F] * 6, 0x04, 0x38, 0x7F, 0x20, 0]
    np.testing.assert_array_equal(qf[0, :416], np.repeat(np.uint8(codes), BLOCK))


def test_fold_groups_raise_a_scale_above_the_headroom_alone(ops: Ops) -> None:
    """A second span that is 2^3 larger does not change the scale, 2^4 raises it by one; it never decreases."""
    q = np.full((2, 3 * SPAN), 0x38, np.uint8)
    sf = np.repeat(np.uint8([[100, 103, 90], [100, 104, 90]]), SPAN // BLOCK, axis=1)
    _, span_sf = ops["fold_groups"](q, sf, np.int32([3 * SPAN]))
    np.testing.assert_array_equal(span_sf.T, [[103, 103, 103, 0], [103, 104, 104, 0]])


# --- the products ---------------------------------------------------------------------------------------


def by_row(x: Array) -> Pair:
    return fold_oracle.fold_rows(*quantize_oracle.quantize_row(x))


def by_group(x: Array, group_ends: Array) -> Pair:
    return fold_oracle.fold_groups(*quantize_oracle.quantize_col(x), group_ends)


@needs("grouped_mm_fold_bias")
@out_dtypes
def test_sum_and_bias_are_rounded_once(ops: Ops, out_dtype: str) -> None:
    """bf16 holds 258 and not 257; each column of each group has another bias."""
    lhs = np.zeros((70, 32), np.uint8)
    lhs[:, :2] = 0x58, 0x38  # 16, 1
    rhs, one = np.broadcast_to(lhs[0], (2, 136, 32)).copy(), np.full((2, 136), 127, np.uint8)
    bias = np.arange(1, 273, dtype=np.float32).reshape(2, 136) * 2 - 1
    ends = np.int32([33, 65])
    got = ops["grouped_mm_fold_bias"](lhs, one[0, :70], rhs, one, bias, ends, out_dtype=out_dtype)
    want = np.zeros((70, 136))
    want[:33], want[33:65] = 257 + bias[0], 257 + bias[1]
    check.same_bytes(got, oracle_math.round_to(want, out_dtype))


def rising(rng: np.random.Generator, columns: int, highest: int) -> Array:
    """(1440, columns) fp32. By column, magnitudes are constant, rise by 2 or by 2^17 from span to span or by 2^200 at
    once, up to about 2^highest. One column begins with a NaN, one with zeros."""
    span, column = np.arange(1440)[:, None] // SPAN, np.arange(columns)
    octaves = [span * 0, span - 5, 17 * (span - 5), np.where(span < 2, -200, 0)]
    x = rng.standard_normal((1440, columns)) * np.exp2(np.choose(column % 4, octaves) + highest)
    x[100, 5], x[:300, 6] = np.nan, 0
    return x.astype(np.float32)


@needs("grouped_wgrad_fold")
@out_dtypes
@pytest.mark.parametrize("name", SPANNED)
def test_sums_follow_scales_that_rise(backend: str, ops: Ops, name: str, out_dtype: str) -> None:
    """Within the bound plus the products below fp32's normal numbers, which XLA on a CPU flushes."""
    rng, ends = seeded("rising"), SPANNED[name]
    operands = rising(rng, 40, 85), rising(rng, 24, 0)[:, ::-1][:, :8]
    lhs, rhs = (by_group(x, ends) for x in operands)
    got = ops["grouped_wgrad_fold"](*lhs, *rhs, ends, out_dtype=out_dtype)
    a, b = (fold_oracle.span_values(*pair, ends).T for pair in (lhs, rhs))
    exact, magnitude = (
        grouped_gemm_oracle.grouped_wgrad_bf16(*pair, ends, "float64") for pair in ((a, b), (np.abs(a), np.abs(b)))
    )
    check.gemm_bound(got, exact, magnitude, len(a), check.fp8_chain(backend), len(a) * 2.0**-126)


# Of the scale of lhs, of rhs: behind the first of three spans. 2^-126 is the last factor that is not zero.
RISES = [(0, 0), (1, 0), (0, 1), (17, 17), (126, 0), (0, 127), (60, 70), (200, 0), (0, 200)]


@needs("grouped_wgrad_fold")
@pytest.mark.parametrize("rises", RISES, ids=str)
def test_rises_of_known_size(ops: Ops, rises: tuple[int, int]) -> None:
    """Products of ones; the second group does not start at a multiple of 256; tokens past the last end are NaN."""
    ends, tokens = np.int32([640, 1216]), [256, 256, 128]
    q, sf = np.full((8, 1280), 0x38, np.uint8), []
    q[:, ends[-1] :] = 0x7F
    for rise in rises:
        course = 127 - rise // 2 + np.uint8([0, rise, rise])
        sf.append(np.repeat(np.uint8([*course, *course, 255])[:, None], 8, axis=1))
    got = ops["grouped_wgrad_fold"](q, sf[0], q, sf[1], ends, out_dtype="float32")
    scales = np.exp2(sum((s[:3, 0].astype(np.int32) - 127 for s in sf), np.zeros(3)))
    want = np.float32([tokens @ scales, [256, 256, 64] @ scales])
    np.testing.assert_array_equal(got, np.broadcast_to(want[:, None, None], (2, 8, 8)))


@needs("grouped_wgrad_fold")
def test_scales_that_rise_all_along_a_group(ops: Ops) -> None:
    """Products of ones in groups of 35, 0, 1 and 18 spans, whose scales rise up to four times by row: sums that fp32
    holds exactly. Tokens past the last end are NaN."""
    rng, ends, tokens = seeded("along"), np.int32([8800, 8800, 8832, 13344]), 13568
    operands = []
    for rows in (201, 16):
        q = np.full((rows, tokens), 0x38, np.uint8)
        q[:, ends[-1] :] = 0x7F
        sf = np.full((tokens // SPAN + len(ends), rows), 255, np.uint8)
        for group in fold_oracle.span_slices(ends):
            rises = np.zeros(rows, np.uint8)
            for slot, _ in group:
                sf[slot] = 120 + rises
                rises = np.minimum(rises + (rng.random(rows) < 0.1), 4)
        operands += [q, sf]
    got = ops["grouped_wgrad_fold"](*operands, ends, out_dtype="float32")
    np.testing.assert_array_equal(got, oracle_folded.grouped_wgrad_fold(*operands, ends, "float32"))


@needs("grouped_mm_fold", "grouped_wgrad_fold")
def test_no_group_reads_the_next_one(ops: Ops) -> None:
    """Operands are ones, and NaN past the group's end, which is any multiple of 32 terms or any row of a tile."""
    for end in (32, 64, 96, 128, 160, 224):
        q = np.full((16, SPAN), 0x38, np.uint8)
        q[:, end:] = 0x7F
        one = np.full((3, 16), 127, np.uint8)
        got = ops["grouped_wgrad_fold"](q, one, q, one, np.int32([end, end]), out_dtype="float32")
        np.testing.assert_array_equal(got, np.stack([np.full((16, 16), end), np.zeros((16, 16))]).astype(np.float32))
    for end in (1, 7, 63, 64, 65, 129):
        lhs, rhs = np.full((160, 64), 0x38, np.uint8), np.full((2, 8, 64), 0x38, np.uint8)
        lhs[end:], rhs[1] = 0x7F, 0x7F
        lhs_sf, rhs_sf = np.full(160, 127, np.uint8), np.full((2, 8), 127, np.uint8)
        got = ops["grouped_mm_fold"](lhs, lhs_sf, rhs, rhs_sf, np.int32([end, end]), out_dtype="float32")
        np.testing.assert_array_equal(got, np.where(np.arange(160)[:, None] < end, 64, np.zeros((160, 8), np.float32)))


@needs("grouped_wgrad_fold")
def test_an_empty_group_is_zero_whatever_its_scales(ops: Ops) -> None:
    q, sf = np.zeros((8, 32), np.uint8), np.uint8([[255] * 8, [127] * 8])
    got = ops["grouped_wgrad_fold"](q, sf, q, sf, np.int32([0, 32]), out_dtype="float32")
    np.testing.assert_array_equal(got, np.zeros((2, 8, 8), np.float32))


# Row byte, column byte: the result equals one multiplication by both. The last two lines are pairs on both sides of the
# limit from which the sm_90 kernel multiplies in steps.
FAR = [(0, 254), (254, 0), (64, 190), (20, 230), (0, 127), (127, 255), (255, 0)]
FAR += [(74, 74), (73, 74), (74, 73), (190, 186), (191, 186), (186, 191), (73, 191)]


@needs("grouped_mm_fold")
@out_dtypes
@pytest.mark.parametrize(("row", "col"), FAR)
def test_scales_far_apart(backend: str, ops: Ops, row: int, col: int, out_dtype: str) -> None:
    """32 products of ones. XLA's matmul on a CPU reads subnormal operands as zeros: there 2^-127 is 0."""
    ones = np.full((40, 32), 0x38, np.uint8)
    rhs, rhs_sf = ones[None, :8], np.full((1, 8), col, np.uint8)
    got = ops["grouped_mm_fold"](ones, np.full(40, row, np.uint8), rhs, rhs_sf, np.int32([40]), out_dtype=out_dtype)
    with np.errstate(invalid="ignore"):
        want = 32 * oracle_math.e8m0_value(np.uint8(row)) * oracle_math.e8m0_value(np.uint8(col))
    if offers(backend, "FLUSHES_SUBNORMALS") and 0 in (row, col) and 255 not in (row, col):
        want = 0
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got.astype(np.float32), np.full((40, 8), want).astype(np.float32))


@needs("grouped_mm_fold_bias")
@out_dtypes
@pytest.mark.parametrize(("row", "col"), [pair for pair in FAR if 0 not in pair])
def test_a_bias_beside_scales_far_apart(ops: Ops, row: int, col: int, out_dtype: str) -> None:
    """32 products of ones less a quarter of their sum: exact, NaN, or infinite where the products are."""
    ones = np.full((40, 32), 0x38, np.uint8)
    rhs, rhs_sf = ones[None, :8], np.full((1, 8), col, np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.float32(32 * oracle_math.e8m0_value(np.uint8(row)) * oracle_math.e8m0_value(np.uint8(col)))
    bias = np.full((1, 8), -product / 4 if np.isfinite(product) else -1, np.float32)
    sf, ends = np.full(40, row, np.uint8), np.int32([40])
    got = ops["grouped_mm_fold_bias"](ones, sf, rhs, rhs_sf, bias, ends, out_dtype=out_dtype)
    np.testing.assert_array_equal(got.astype(np.float32), np.full((40, 8), product + bias[0, 0]))
