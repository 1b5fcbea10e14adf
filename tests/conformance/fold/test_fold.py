"""What a fold does to values; fused with other ops it changes no byte. Its loss: ../layer/test_accuracy.py."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.cases import BF16
from mxep.core_kernels.fold.cases import CONFORMANCE
from mxep.core_kernels.formats import BLOCK

from .. import check

Ops = Mapping[str, Callable]


def test_a_nan_block_stays_nan_and_leaves_the_others_alone(ops: Ops) -> None:
    q = np.full((2, 3 * BLOCK), 0x38, np.uint8)  # 1.0
    qf, row_sf = ops["fold_rows"](q, np.uint8([[127, 255, 126], [255, 255, 255]]))
    np.testing.assert_array_equal(row_sf, [127, 255])
    np.testing.assert_array_equal(qf[:, ::BLOCK], [[0x38, 0x7F, 0x30], [0x7F, 0x7F, 0x7F]])
    np.testing.assert_array_equal(qf, np.repeat(qf[:, ::BLOCK], BLOCK, axis=1))


@pytest.mark.parametrize("name", [name for name in CONFORMANCE if name.startswith("fold_rows-headroom")])
def test_the_first_256_values_count_as_larger_with_a_headroom(ops: Ops, name: str) -> None:
    (q, sf), options = CONFORMANCE[name].arrays(), CONFORMANCE[name].options_of()
    _, row_sf = ops["fold_rows"](q, sf, **options)
    for row, scale in zip(sf.tolist(), row_sf.tolist(), strict=True):
        raised = [min(s + options["headroom"], 254) if i < 8 else s for i, s in enumerate(row) if s != 255]
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


@given(data=st.data())
def test_fusing_changes_no_byte_and_folding_twice_neither(ops: Ops, data: st.DataObject) -> None:
    x = data.draw(hnp.arrays(np.uint16, (8, 96), elements=st.integers(0, 2**16 - 1))).view(BF16)
    qf, row_sf = ops["fold_rows"](*ops["quantize_row"](x))
    check.same_bytes(ops["quantize_row_fold"](x), (qf, row_sf))
    check.same_bytes(ops["fold_rows"](qf, np.repeat(row_sf[:, None], 3, axis=1)), (qf, row_sf))


@given(data=st.data())
def test_one_call_of_both_ways_changes_no_byte(ops: Ops, data: st.DataObject) -> None:
    x = data.draw(hnp.arrays(np.uint16, (64, 32), elements=st.integers(0, 2**16 - 1))).view(BF16)
    ends = np.sort(data.draw(hnp.arrays(np.int32, 3, elements=st.integers(0, 2)))) * np.int32(BLOCK)
    columns = ops["fold_groups"](*ops["quantize_col"](x), ends)
    want = *ops["quantize_row_fold"](x), *columns
    check.same_specified("quantize_both_fold", (x, ends), ops["quantize_both_fold"](x, ends), want)


@given(data=st.data())
def test_one_call_of_mxfp8_rows_changes_no_byte(ops: Ops, data: st.DataObject) -> None:
    """For fp32 values too: bf16 holds every element under every scale that is no extreme."""
    q = data.draw(hnp.arrays(np.uint8, (64, 32)))
    sf = data.draw(hnp.arrays(np.uint8, (64, 1), elements=st.integers(3, 245)))
    ends = np.sort(data.draw(hnp.arrays(np.int32, 3, elements=st.integers(0, 2)))) * np.int32(BLOCK)
    x = ops["dequantize"](q, sf, out_dtype="float32")
    want = ops["fold_groups"](*ops["quantize_col"](x), ends)
    check.same_specified("requantize_col_fold", (q, sf, ends), ops["requantize_col_fold"](q, sf, ends), want)
