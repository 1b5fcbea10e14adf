"""fold_rows, alone and fused with quantize and permute: exact bytes. What folding loses: ../layer/test_accuracy.py."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.cases import BF16, seeded
from mxep.core_kernels.fold.cases import every_shift
from mxep.core_kernels.formats import BLOCK, Rounding
from mxep.core_kernels.quantize import oracle as quantize_oracle
from mxep.core_kernels.quantize.cases import MATRICES

from .. import check
from ..definitions import DEFINITIONS

Ops = Mapping[str, Callable]


def test_fold_every_element_by_every_shift(ops: Ops) -> None:
    q, sf = every_shift()
    check.same_bytes(ops["fold_rows"](q, sf), DEFINITIONS["fold_rows"](q, sf))


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (37, 544), (3, 5, 96)])
def test_fold_shapes(ops: Ops, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(0, 256, shape, np.uint8)
    sf = rng.integers(100, 140, (*shape[:-1], shape[-1] // BLOCK), np.uint8)
    check.same_bytes(ops["fold_rows"](q, sf), DEFINITIONS["fold_rows"](q, sf))


def test_a_nan_block_stays_nan_and_leaves_the_others_alone(ops: Ops) -> None:
    q = np.full((2, 3 * BLOCK), 0x38, np.uint8)  # 1.0
    qf, row_sf = ops["fold_rows"](q, np.uint8([[127, 255, 126], [255, 255, 255]]))
    np.testing.assert_array_equal(row_sf, [127, 255])
    np.testing.assert_array_equal(qf[:, ::BLOCK], [[0x38, 0x7F, 0x30], [0x7F, 0x7F, 0x7F]])
    np.testing.assert_array_equal(qf, np.repeat(qf[:, ::BLOCK], BLOCK, axis=1))


@pytest.mark.parametrize("headroom", [0, 1, 7])
@pytest.mark.parametrize("k", [64, 256, 288, 800])
def test_the_first_256_values_count_as_larger_with_a_headroom(ops: Ops, k: int, headroom: int) -> None:
    """Scales close to each other, with NaN blocks, first spans of NaN blocks alone, and the largest scale."""
    rng = seeded(f"headroom {k}")
    sf = rng.integers(100, 104, (64, k // BLOCK), np.uint8)
    sf[rng.random(sf.shape) < 0.05] = 255
    sf[:4, :8], sf[4:8] = 255, rng.integers(248, 255, (4, k // BLOCK))
    q = rng.integers(0, 256, (64, k), np.uint8)
    qf, row_sf = ops["fold_rows"](q, sf, headroom=headroom)
    check.same_bytes((qf, row_sf), DEFINITIONS["fold_rows"](q, sf, headroom))
    for row, scale in zip(sf.tolist(), row_sf.tolist(), strict=True):
        raised = [min(s + headroom, 254) if i < 8 else s for i, s in enumerate(row) if s != 255]
        assert scale == max(raised, default=255)


def test_a_larger_block_beyond_the_first_256_values_folds_the_row_twice(ops: Ops) -> None:
    """1.25 * 2^-8 is 2.5 of E4M3's smallest values and becomes 2. A quarter of 2 becomes 0, one of 2.5 would be 1."""
    q = np.full((1, 9 * BLOCK), 0x3A, np.uint8)  # 1.25
    sf = np.uint8([[120, 113, *[120] * 6, 123]])
    qf, row_sf = ops["fold_rows"](q, sf, headroom=1)
    np.testing.assert_array_equal(row_sf, [123])
    np.testing.assert_array_equal(qf[0, ::BLOCK], [0x22, 0, *[0x22] * 6, 0x3A])
    qf, _ = ops["fold_rows"](q, sf)
    np.testing.assert_array_equal(qf[0, BLOCK : 2 * BLOCK], 1)


@pytest.mark.parametrize("headroom", [0, 1, 7])
def test_a_headroom_of_quantized_rows(ops: Ops, headroom: int) -> None:
    x = MATRICES["all_bf16_shuffled"]
    x = np.concatenate([x.reshape(-1, 1024), np.zeros((4, 1024), x.dtype)])
    got = ops["quantize_row_fold"](x, headroom=headroom)
    check.same_bytes(got, DEFINITIONS["fold_rows"](*quantize_oracle.quantize_row(x), headroom))


@pytest.mark.parametrize("rounding", Rounding, ids=lambda r: r.name.lower())
@pytest.mark.parametrize("name", MATRICES)
def test_quantize_row_fold(ops: Ops, name: str, rounding: Rounding) -> None:
    x = MATRICES[name]
    want = DEFINITIONS["fold_rows"](*quantize_oracle.quantize_row(x, rounding, True))
    check.same_bytes(ops["quantize_row_fold"](x, rounding=rounding, satfinite=True), want)
    check.same_bytes(ops["quantize_row_fold"](x, rounding=rounding), DEFINITIONS["quantize_row_fold"](x, rounding))


@given(data=st.data())
def test_fusing_changes_no_byte_and_folding_twice_neither(ops: Ops, data: st.DataObject) -> None:
    x = data.draw(hnp.arrays(np.uint16, (8, 96), elements=st.integers(0, 2**16 - 1))).view(BF16)
    qf, row_sf = ops["fold_rows"](*ops["quantize_row"](x))
    check.same_bytes(ops["quantize_row_fold"](x), (qf, row_sf))
    check.same_bytes(ops["fold_rows"](qf, np.repeat(row_sf[:, None], 3, axis=1)), (qf, row_sf))
