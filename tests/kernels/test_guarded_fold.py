"""Fold and the scale layout between guards, in C++ and in Triton's interpreter: no byte outside is read or written."""

import numpy as np
import pytest
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.fold import plan as fold
from mxep.core_kernels.scale_layout import oracle as scale_layout_oracle
from mxep.core_kernels.scale_layout import plan as scale_layout


@pytest.mark.parametrize(("rows", "k"), [(1, 32), (5, 96), (65, 544)])
def test_fold_rows(guarded_op, rows, k):
    rng = np.random.default_rng(k)
    q, sf = rng.integers(0, 256, (rows, k), np.uint8), rng.integers(110, 140, (rows, k // 32), np.uint8)
    for got, want in zip(guarded_op(fold.fold_rows, q, sf), fold_oracle.fold_rows(q, sf), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("ends", [[608], [32, 32, 352], [288, 608], [0, 0], []])
def test_fold_groups(guarded_op, ends):
    rng, group_ends = np.random.default_rng(2), np.int32(ends)
    q, sf = rng.integers(0, 256, (7, 608), np.uint8), rng.integers(110, 140, (7, 19), np.uint8)
    got, want = guarded_op(fold.fold_groups, q, sf, group_ends), fold_oracle.fold_groups(q, sf, group_ends)
    arrays = q, sf, group_ends
    for g, w in zip(*(fold.fold_groups.specified(arrays, found) for found in (got, want)), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("ends", [[7], [0, 130, 130, 300], [300]])
def test_scale_layout(guarded_op, ends):
    sf, group_ends = np.random.default_rng(1).integers(0, 256, (300, 9), np.uint8), np.int32(ends)
    (blocked,) = guarded_op(scale_layout.block_scales, sf, group_ends)
    np.testing.assert_array_equal(blocked, scale_layout_oracle.block_scales(sf, group_ends))
    (back,) = guarded_op(scale_layout.unblock_scales, blocked, group_ends, num_rows=300, num_scales=9)
    np.testing.assert_array_equal(back, scale_layout_oracle.unblock_scales(blocked, group_ends, 300, 9))
