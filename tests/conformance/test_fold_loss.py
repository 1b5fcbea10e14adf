"""count_fold_loss: exact counts, and as many changed values in the results of the folds."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.quantize import oracle as quantize_oracle

from . import check
from .cases import SPANNED, seeded
from .extremes import EXTREMES, Extreme
from .test_fold import every_shift

Ops = Mapping[str, Callable]


def test_every_element_by_every_shift(ops: Ops) -> None:
    q, sf = every_shift()
    rng = seeded("targets")
    near = np.clip(sf + rng.integers(-3, 24, sf.shape), 0, 255).astype(np.uint8)
    for target in (near, rng.integers(0, 256, sf.shape, np.uint8)):
        check.same_bytes(ops["count_fold_loss"](q, sf, target), fold_oracle.count_fold_loss(q, sf, target))


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (1, 32), (37, 544), (3, 5, 96)])
def test_shapes(ops: Ops, shape: tuple[int, ...]) -> None:
    rng, blocks = np.random.default_rng(3), (*shape[:-1], shape[-1] // BLOCK)
    arrays = rng.integers(0, 256, shape, np.uint8), *rng.integers(110, 130, (2, *blocks), np.uint8)
    check.same_bytes(ops["count_fold_loss"](*arrays), fold_oracle.count_fold_loss(*arrays))


def test_what_counts_nowhere(ops: Ops) -> None:
    q = np.zeros((4, BLOCK), np.uint8)
    q[:, :4] = 0x39, 0xB9, 0x7F, 0x80  # 1.125, -1.125, NaN, -0
    sf, target = np.uint8([[120], [255], [120], [120]]), np.uint8([[127], [127], [255], [119]])
    counts = ops["count_fold_loss"](q, sf, target)
    np.testing.assert_array_equal(counts, [[2, 0, 0, 2], [2, 0, 0, 0], [0, 0, 0, 0]])


def lost(q: np.ndarray, sf: np.ndarray, folded: np.ndarray) -> tuple[int, int]:
    """The number of values, exact in fp64, that a fold changed to another value than zero, and to zero."""
    value = quantize_oracle.dequantize64(q, sf)
    zero = (folded == 0) & (np.abs(value) > 0)
    return int(np.sum((folded != value) & ~np.isnan(value) & ~zero)), int(np.sum(zero))


@pytest.mark.parametrize("case", EXTREMES.values(), ids=EXTREMES)
def test_rows_changed_where_it_says_so(ops: Ops, case: Extreme) -> None:
    q, sf = quantize_oracle.quantize_row(case.lhs)
    qf, row_sf = ops["fold_rows"](q, sf)
    _, rounded, flushed = ops["count_fold_loss"](q, sf, np.repeat(row_sf[:, None], sf.shape[1], axis=1))
    folded = oracle_math.E4M3_VALUES[qf] * oracle_math.e8m0_value(row_sf)[:, None]
    assert (rounded.sum(), flushed.sum()) == lost(q, sf, folded)


@pytest.mark.parametrize("name", SPANNED)
def test_spans_changed_where_it_says_so(ops: Ops, name: str) -> None:
    ends, rng = SPANNED[name], seeded(name)
    tokens = int(max(ends, default=0))
    x = rng.standard_normal((1440, 24)) * np.exp2(6 * rng.standard_normal((1440, 24)))
    q, sf = quantize_oracle.quantize_col(x.astype(np.float32))
    qf, span_sf = ops["fold_groups"](q, sf, ends)
    target = np.full_like(sf, 255)
    for slot, columns in (span for group in fold_oracle.span_slices(ends) for span in group):
        target[:, columns.start // BLOCK : columns.stop // BLOCK] = span_sf[slot][:, None]
    nonzero, rounded, flushed = ops["count_fold_loss"](q, sf, target)
    assert nonzero.sum() == np.sum(q[:, :tokens] & 0x7F != 0)
    folded = fold_oracle.span_values(qf, span_sf, ends)
    assert (rounded.sum(), flushed.sum()) == lost(q[:, :tokens], sf[:, : tokens // BLOCK], folded[:, :tokens])
