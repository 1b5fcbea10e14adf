"""The grouped products against the oracle's fp64 sums, in Triton's interpreter.

Group ends are any numbers: empty groups first, in the middle and last, no multiples of a tile, rows past the
last end. The guards around every buffer are NaN, and so are the rows that no group owns.

`sm_100_op` runs the programs of sm_100 with their tiles. It replaces `dot_scaled`, which the interpreter lacks, by its
definition in numpy; a GPU computes it in a tensor core.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from mxep.core_kernels import oracle_math
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.grouped_gemm.exact import plan as grouped_gemm
from mxep.core_kernels.grouped_gemm.folded import plan as folded_gemm
from mxep.core_kernels.quantize import oracle as quantize_oracle
from triton.runtime.interpreter import TensorHandle

from ...compare import gemm_bound

BF16 = ml_dtypes.bfloat16
ENDS = {
    "uneven": [5, 70, 135],
    "empty ones": [0, 33, 33, 96, 96],
    "one group": [160],
    "one row": [0, 1, 1],
    "nothing but padding": [0, 0],
    "no group": [],
}


def _dot_scaled(lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, acc):
    """lhs (M, K) with scales (M, K / 32), rhs (K, N) with scales (N, K / 32), which are not transposed."""
    assert (lhs_format, rhs_format) == ("e4m3", "e4m3")
    assert lhs.dtype == rhs.dtype == tl.float8e4nv
    a = quantize_oracle.dequantize(lhs.handle.data, lhs_scale.handle.data).astype(np.float64)
    b = quantize_oracle.dequantize(rhs.handle.data.T, rhs_scale.handle.data).astype(np.float64)
    return tl.tensor(TensorHandle((acc.handle.data + a @ b.T).astype(np.float32), tl.float32), acc.type)


@pytest.fixture
def sm_100_op(monkeypatch, triton_op):
    monkeypatch.setattr(tl, "dot_scaled", _dot_scaled)

    def run(op, *inputs, **options):
        def tile(call, arch):
            tiling = op.tile(call, "sm_100")
            assert tiling.meta["TCGEN05"]
            return tiling._replace(meta={**tiling.meta, "HW_CAST": False})

        with np.errstate(invalid="ignore"):
            return triton_op(replace(op, tile=tile), *inputs, **options)

    return run


def groups_of(ends: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(BF16)


def check_m_grouped(got: np.ndarray, lhs: np.ndarray, rhs_t: np.ndarray, ends: list[int]) -> None:
    lhs, rhs_t = lhs.astype(np.float64), rhs_t.astype(np.float64)
    for g, rows in enumerate(groups_of(ends)):
        want, magnitude = lhs[rows] @ rhs_t[g].T, np.abs(lhs[rows]) @ np.abs(rhs_t[g]).T
        gemm_bound(got[rows], want, magnitude, lhs.shape[1])
    assert not got[ends[-1] if ends else 0 :].any()


def check_k_grouped(got: np.ndarray, lhs: np.ndarray, rhs: np.ndarray, ends: list[int]) -> None:
    lhs, rhs = lhs.astype(np.float64), rhs.astype(np.float64)
    for g, rows in enumerate(groups_of(ends)):
        want, magnitude = lhs[rows].T @ rhs[rows], np.abs(lhs[rows]).T @ np.abs(rhs[rows])
        gemm_bound(got[g], want, magnitude, rows.stop - rows.start)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_mm(triton_op, ends, out_dtype):
    rng = np.random.default_rng(0)
    lhs, rhs_t = normal(rng, 170, 96), normal(rng, len(ends), 80, 96)
    lhs[ends[-1] if ends else 0 :] = np.nan
    group_ends = np.array(ends, np.int32)
    (got,) = triton_op(grouped_gemm.grouped_mm_bf16, lhs, rhs_t, group_ends, out_dtype=out_dtype)
    check_m_grouped(got, lhs, rhs_t, ends)

    operands = *quantize_oracle.quantize_row(lhs), *quantize_oracle.quantize_row(rhs_t)
    (got,) = triton_op(grouped_gemm.grouped_mm_mx, *operands, group_ends, out_dtype=out_dtype)
    check_m_grouped(got, quantize_oracle.dequantize(*operands[:2]), quantize_oracle.dequantize(*operands[2:]), ends)


def folded_values(qf: np.ndarray, sf: np.ndarray) -> np.ndarray:
    return oracle_math.E4M3_VALUES[qf] * oracle_math.e8m0_value(sf)[..., None]


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_mm_fold(triton_op, ends, out_dtype):
    rng = np.random.default_rng(4)
    lhs, rhs_t = normal(rng, 170, 160), normal(rng, len(ends), 80, 160)
    lhs[ends[-1] if ends else 0 :] = np.nan
    operands = (
        *fold_oracle.fold_rows(*quantize_oracle.quantize_row(lhs)),
        *fold_oracle.fold_rows(*quantize_oracle.quantize_row(rhs_t)),
    )
    (got,) = triton_op(folded_gemm.grouped_mm_fold, *operands, np.array(ends, np.int32), out_dtype=out_dtype)
    check_m_grouped(got, folded_values(*operands[:2]), folded_values(*operands[2:]), ends)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ends", [[32, 128], [0, 0, 96, 96], [288, 608], [704], [0, 0], []], ids=str)
def test_wgrad_fold(triton_op, ends, out_dtype):
    """Later tokens are larger, so that scales increase in groups with several spans."""
    rng, group_ends = np.random.default_rng(5), np.array(ends, np.int32)
    larger = np.exp2(np.arange(704) // 128)[:, None]
    lhs, rhs = (x * larger.astype(BF16) for x in (normal(rng, 704, 80), normal(rng, 704, 72)))
    lhs[ends[-1] if ends else 0 :] = np.nan
    pairs = [fold_oracle.fold_groups(*quantize_oracle.quantize_col(x), group_ends) for x in (lhs, rhs)]
    (got,) = triton_op(folded_gemm.grouped_wgrad_fold, *pairs[0], *pairs[1], group_ends, out_dtype=out_dtype)
    check_k_grouped(got, *(fold_oracle.span_values(*pair, group_ends).T for pair in pairs), ends)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_wgrad_bf16(triton_op, ends, out_dtype):
    rng = np.random.default_rng(1)
    lhs, rhs = normal(rng, 170, 80), normal(rng, 170, 72)
    lhs[ends[-1] if ends else 0 :] = np.nan
    group_ends = np.array(ends, np.int32)
    (got,) = triton_op(grouped_gemm.grouped_wgrad_bf16, lhs, rhs, group_ends, out_dtype=out_dtype)
    check_k_grouped(got, lhs, rhs, ends)
    transposed = (np.ascontiguousarray(x.T) for x in (lhs, rhs))
    (got,) = triton_op(grouped_gemm.grouped_wgrad_bf16_t, *transposed, group_ends, out_dtype=out_dtype)
    check_k_grouped(got, lhs, rhs, ends)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("ends", [[32, 128], [0, 0, 96, 96], [160], [0, 0], []], ids=str)
def test_wgrad_mx(triton_op, ends, out_dtype):
    rng = np.random.default_rng(2)
    lhs, rhs = normal(rng, 160, 80), normal(rng, 160, 72)
    lhs[ends[-1] if ends else 0 :] = np.nan
    operands = *quantize_oracle.quantize_col(lhs), *quantize_oracle.quantize_col(rhs)
    (got,) = triton_op(grouped_gemm.grouped_wgrad_mx, *operands, np.array(ends, np.int32), out_dtype=out_dtype)
    check_k_grouped(got, quantize_oracle.dequantize(*operands[:2]).T, quantize_oracle.dequantize(*operands[2:]).T, ends)


@pytest.mark.parametrize(
    ("ends", "out_dtype"),
    [([130, 301], "bfloat16"), ([0, 33, 33, 96, 96], "float32"), ([0, 0], "bfloat16"), ([], "float32")],
    ids=str,
)
def test_mm_on_sm_100(sm_100_op, ends, out_dtype):
    rng = np.random.default_rng(6)
    lhs, rhs_t = normal(rng, 310, 160), normal(rng, len(ends), 264, 160)
    lhs[ends[-1] if ends else 0 :] = np.nan
    group_ends = np.array(ends, np.int32)
    operands = *quantize_oracle.quantize_row(lhs), *quantize_oracle.quantize_row(rhs_t)
    (got,) = sm_100_op(grouped_gemm.grouped_mm_mx, *operands, group_ends, out_dtype=out_dtype)
    check_m_grouped(got, quantize_oracle.dequantize(*operands[:2]), quantize_oracle.dequantize(*operands[2:]), ends)


@pytest.mark.parametrize(
    ("ends", "out_dtype"),
    [([32, 608], "bfloat16"), ([0, 0, 96, 96], "float32"), ([0, 0], "bfloat16"), ([], "float32")],
    ids=str,
)
def test_wgrad_on_sm_100(sm_100_op, ends, out_dtype):
    rng = np.random.default_rng(7)
    lhs, rhs = normal(rng, 640, 136), normal(rng, 640, 264)
    lhs[ends[-1] if ends else 0 :] = np.nan
    group_ends = np.array(ends, np.int32)
    operands = *quantize_oracle.quantize_col(lhs), *quantize_oracle.quantize_col(rhs)
    (got,) = sm_100_op(grouped_gemm.grouped_wgrad_mx, *operands, group_ends, out_dtype=out_dtype)
    check_k_grouped(got, quantize_oracle.dequantize(*operands[:2]).T, quantize_oracle.dequantize(*operands[2:]).T, ends)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_bf16_products_on_sm_100(sm_100_op, out_dtype):
    rng, ends = np.random.default_rng(9), [5, 70, 135]
    lhs, rhs_t, rhs = normal(rng, 170, 96), normal(rng, 3, 80, 96), normal(rng, 170, 72)
    lhs[135:] = np.nan
    group_ends = np.array(ends, np.int32)
    (got,) = sm_100_op(grouped_gemm.grouped_mm_bf16, lhs, rhs_t, group_ends, out_dtype=out_dtype)
    check_m_grouped(got, lhs, rhs_t, ends)
    (got,) = sm_100_op(grouped_gemm.grouped_wgrad_bf16, lhs, rhs, group_ends, out_dtype=out_dtype)
    check_k_grouped(got, lhs, rhs, ends)
    transposed = (np.ascontiguousarray(x.T) for x in (lhs, rhs))
    (got,) = sm_100_op(grouped_gemm.grouped_wgrad_bf16_t, *transposed, group_ends, out_dtype=out_dtype)
    check_k_grouped(got, lhs, rhs, ends)


def test_nan_stays_in_its_row_on_sm_100(sm_100_op):
    """Rows 3 and 40 of one product, tokens 32 to 64 of the other: groups before and after them are finite."""
    rng = np.random.default_rng(8)
    lhs, rhs_t = normal(rng, 96, 64), normal(rng, 3, 40, 64)
    lhs[3, 7], lhs[40, 1] = np.nan, np.inf
    ends = np.array([32, 64, 96], np.int32)
    (got,) = sm_100_op(
        grouped_gemm.grouped_mm_mx,
        *quantize_oracle.quantize_row(lhs),
        *quantize_oracle.quantize_row(rhs_t),
        ends,
        out_dtype="float32",
    )
    assert np.flatnonzero(~np.isfinite(got).all(1)).tolist() == [3, 40]
    rhs = normal(rng, 96, 72)
    lhs[3, 7] = 0
    (got,) = sm_100_op(
        grouped_gemm.grouped_wgrad_mx,
        *quantize_oracle.quantize_col(lhs),
        *quantize_oracle.quantize_col(rhs),
        ends,
        out_dtype="float32",
    )
    assert np.argwhere(~np.isfinite(got).all(2)).tolist() == [[1, 1]]


def test_nan_stays_in_its_row(triton_op):
    rng = np.random.default_rng(3)
    lhs, rhs_t = normal(rng, 70, 64), normal(rng, 2, 40, 64)
    lhs[3, 7] = np.nan
    lhs[40, 1] = np.inf
    operands = *quantize_oracle.quantize_row(lhs), *quantize_oracle.quantize_row(rhs_t)
    group_ends = np.array([30, 70], np.int32)
    for (got,) in (
        triton_op(grouped_gemm.grouped_mm_bf16, lhs, rhs_t, group_ends),
        triton_op(grouped_gemm.grouped_mm_mx, *operands, group_ends),
    ):
        rows = ~np.isfinite(got.astype(np.float32)).all(1)
        assert np.flatnonzero(rows).tolist() == [3, 40]


def test_extreme_scales(triton_op):
    """2^-127 times 2^127: subnormal scales are not flushed, and their product does not overflow."""
    k = 32
    lhs = np.full((4, k), 0x38, np.uint8), np.full((4, 1), 0, np.uint8)  # 1.0 * 2^-127
    rhs = np.full((1, 4, k), 0x38, np.uint8), np.full((1, 4, 1), 254, np.uint8)  # 1.0 * 2^127
    (got,) = triton_op(grouped_gemm.grouped_mm_mx, *lhs, *rhs, np.array([4], np.int32))
    np.testing.assert_array_equal(got.astype(np.float32), np.full((4, 4), k, np.float32))


@pytest.mark.parametrize(("m", "n", "k", "groups"), [(0, 8, 32, 2), (8, 0, 32, 2), (8, 8, 0, 2), (8, 8, 32, 0)])
def test_empty_dims(triton_op, m, n, k, groups):
    """Empty sums are zeros."""
    ends = np.full(groups, m, np.int32)
    ones = {"dtype": BF16}
    (got,) = triton_op(grouped_gemm.grouped_mm_bf16, np.ones((m, k), **ones), np.ones((groups, n, k), **ones), ends)
    assert got.shape == (m, n)
    assert not (got != (k if groups else 0)).any()
    (got,) = triton_op(grouped_gemm.grouped_wgrad_bf16, np.ones((m, n), **ones), np.ones((m, k), **ones), ends)
    assert got.shape == (groups, n, k)
    assert not got[1:].any()
