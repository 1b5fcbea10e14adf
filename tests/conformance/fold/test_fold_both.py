"""quantize_both_fold: bitwise equal to the ops that it is composed of."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.cases import BF16, MODES
from mxep.core_kernels.fold.cases import COURSES, SPANNED, WIDE_COURSES
from mxep.core_kernels.formats import BLOCK, spans
from mxep.core_kernels.quantize.cases import MATRICES, ROW_ONLY

from .. import check
from ..definitions import DEFINITIONS

pytestmark = pytest.mark.composed
Ops = Mapping[str, Callable]
Array = np.ndarray
SMALL = {name: x for name, x in MATRICES.items() if x.ndim == 2 and name not in ROW_ONLY and x.shape[1] % BLOCK == 0}


def assert_composed(ops: Ops, x: Array, ends: Array, **mode: int) -> None:
    check.same_bytes(ops["quantize_both_fold"](x, ends, **mode), DEFINITIONS["quantize_both_fold"](x, ends, **mode))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_value(ops: Ops, name: str, mode: str) -> None:
    m = len(SMALL[name])
    half = m // 2 // BLOCK * BLOCK
    assert_composed(ops, SMALL[name], np.int32([0, half, half, m]), **MODES[mode])


@pytest.mark.parametrize("ends", SPANNED)
@pytest.mark.parametrize("name", COURSES)
def test_scales_rise_from_span_to_span(ops: Ops, name: str, ends: str) -> None:
    assert_composed(ops, COURSES[name], SPANNED[ends])


@pytest.mark.parametrize("mode", MODES)
def test_scales_rise_in_every_mode(ops: Ops, mode: str) -> None:
    assert_composed(ops, WIDE_COURSES, SPANNED["every_length"], **MODES[mode])


@pytest.mark.parametrize("ends", [[0, 0], [0], []], ids=str)
def test_no_rows(ops: Ops, ends: list[int]) -> None:
    got = ops["quantize_both_fold"](np.zeros((0, 64), BF16), np.array(ends, np.int32))
    check.same_bytes(got, [np.zeros(shape, np.uint8) for shape in ((0, 64), 0, (64, 0), (spans(0, len(ends)), 64))])


@given(data=st.data())
def test_one_call_changes_no_byte(ops: Ops, data: st.DataObject) -> None:
    x = data.draw(hnp.arrays(np.uint16, (64, 32), elements=st.integers(0, 2**16 - 1))).view(BF16)
    ends = np.sort(data.draw(hnp.arrays(np.int32, 3, elements=st.integers(0, 2)))) * np.int32(BLOCK)
    columns = ops["fold_groups"](*ops["quantize_col"](x), ends)
    check.same_bytes(ops["quantize_both_fold"](x, ends), (*ops["quantize_row_fold"](x), *columns))
