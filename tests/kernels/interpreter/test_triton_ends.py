"""Group ends that break the contract, in Triton's interpreter: a GPU does not check them. The groups on both sides of
such an end are NaN, all other groups are correct, and no byte outside is read or written."""

import ml_dtypes
import numpy as np
import pytest
from mxep.core_kernels.fold import oracle
from mxep.core_kernels.fold import plan as fold
from mxep.core_kernels.formats import BLOCK, SPAN, spans
from mxep.core_kernels.grouped_gemm.exact import plan as grouped_gemm
from mxep.core_kernels.grouped_gemm.folded import plan as folded_gemm

TOKENS = 608
NO_MULTIPLES = {
    "both sides": ([20, 64, 96], [0, 1]),
    "one after the other": ([33, 33, 320, 608], [0, 1, 2]),
    "the last": ([32, 600], [1]),
    "within one block": ([65, 70, 96], [0, 1, 2]),
    "a later span": ([288, 564, 608], [1, 2]),
}
OUT_OF_ORDER = {
    "before it begins": ([64, 32, 608], [1]),
    "beyond all tokens": ([0, 64, 640], [2]),
    "below zero": ([-32, 64], [0, 1]),
}
BROKEN = NO_MULTIPLES | OUT_OF_ORDER
"""Ends, and the groups that are not whole."""


def sums_of_ones(ends: list[int], broken: list[int]) -> np.ndarray:
    """(G, 1, 1): the number of tokens per group."""
    sums = np.diff(np.float32(ends), prepend=0)
    sums[broken] = np.nan
    return sums[:, None, None]


@pytest.mark.parametrize("name", BROKEN)
def test_products_along_tokens_in_blocks(triton_op, name):
    ends, broken = BROKEN[name]
    lhs, rhs = np.full((72, TOKENS), 0x38, np.uint8), np.full((8, TOKENS), 0x38, np.uint8)  # 1.0
    for op, scales in (
        (grouped_gemm.grouped_wgrad_mx, lambda q: (len(q), TOKENS // BLOCK)),
        (folded_gemm.grouped_wgrad_fold, lambda q: (spans(TOKENS, len(ends)), len(q))),
    ):
        lhs_sf, rhs_sf = (np.full(scales(q), 127, np.uint8) for q in (lhs, rhs))
        (got,) = triton_op(op, lhs, lhs_sf, rhs, rhs_sf, np.int32(ends), out_dtype="float32")
        np.testing.assert_array_equal(got, np.broadcast_to(sums_of_ones(ends, broken), got.shape))


@pytest.mark.parametrize("name", BROKEN)
def test_products_of_bf16_take_any_ends_in_order(triton_op, name):
    ends, broken = BROKEN[name]
    lhs, rhs = np.ones((TOKENS, 72), ml_dtypes.bfloat16), np.ones((TOKENS, 8), ml_dtypes.bfloat16)
    want = sums_of_ones(ends, broken if name in OUT_OF_ORDER else [])
    for op, operands in (
        (grouped_gemm.grouped_wgrad_bf16, (lhs, rhs)),
        (grouped_gemm.grouped_wgrad_bf16_t, (lhs.T, rhs.T)),
    ):
        (got,) = triton_op(op, *map(np.ascontiguousarray, operands), np.int32(ends), out_dtype="float32")
        np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


@pytest.mark.parametrize(("ends", "rows_of_ones"), [([-64, 64], 64), ([-64], 0), ([32, 700], 96)])
def test_products_of_rows(triton_op, ends, rows_of_ones):
    """Ends outside the rows count as the nearest row."""
    rows, k, groups = 96, 32, len(ends)
    x, w = np.ones((rows, k), ml_dtypes.bfloat16), np.ones((groups, 8, k), ml_dtypes.bfloat16)
    codes, w_codes = np.full((rows, k), 0x38, np.uint8), np.full((groups, 8, k), 0x38, np.uint8)  # 1.0
    sf, w_sf = np.full((rows, 1), 127, np.uint8), np.full((groups, 8, 1), 127, np.uint8)
    want = np.zeros((rows, 8), np.float32)
    want[:rows_of_ones] = k
    for op, operands in (
        (grouped_gemm.grouped_mm_bf16, (x, w)),
        (grouped_gemm.grouped_mm_mx, (codes, sf, w_codes, w_sf)),
        (folded_gemm.grouped_mm_fold, (codes, sf[:, 0], w_codes, w_sf[..., 0])),
    ):
        (got,) = triton_op(op, *operands, np.int32(ends), out_dtype="float32")
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", NO_MULTIPLES)
def test_fold_groups(triton_op, name):
    """The codes and the other scales are those for ends rounded down to multiples of 32."""
    ends, broken = NO_MULTIPLES[name]
    rng, below = np.random.default_rng(4), np.int32(ends) // BLOCK * BLOCK
    q, sf = rng.integers(0, 256, (7, TOKENS), np.uint8), rng.integers(110, 140, (7, TOKENS // BLOCK), np.uint8)
    qf, span_sf = triton_op(fold.fold_groups, q, sf, np.int32(ends))
    want, want_sf = oracle.fold_groups(q, sf, below)
    for g in broken:
        begin = below[g - 1] if g else 0
        want_sf[begin // SPAN + g : below[g] // SPAN + g + 1] = 255
    np.testing.assert_array_equal(qf[:, : below[-1]], want[:, : below[-1]])
    np.testing.assert_array_equal(span_sf, want_sf)
