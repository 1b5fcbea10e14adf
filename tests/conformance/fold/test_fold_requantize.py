"""The token operand of MXFP8 rows from one call, bit for bit: the bytes of the three ops which define it."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.cases import MODES, seeded
from mxep.core_kernels.fold.cases import COURSES, SPANNED
from mxep.core_kernels.formats import BLOCK, spans
from mxep.core_kernels.quantize import oracle as quantize_oracle

from .. import check
from ..definitions import DEFINITIONS

pytestmark = pytest.mark.composed
Ops = Mapping[str, Callable]
Array = np.ndarray


def assert_defined(ops: Ops, *arrays: Array, **mode: int) -> None:
    check.same_bytes(ops["requantize_col_fold"](*arrays, **mode), DEFINITIONS["requantize_col_fold"](*arrays, **mode))


@pytest.mark.parametrize("ends", SPANNED)
@pytest.mark.parametrize("name", COURSES)
def test_scales_rise_from_span_to_span(ops: Ops, name: str, ends: str) -> None:
    assert_defined(ops, *quantize_oracle.quantize_row(COURSES[name]), SPANNED[ends])


@pytest.mark.parametrize("mode", MODES)
def test_any_bytes(ops: Ops, mode: str) -> None:
    """Every code under every scale, next to blocks of ordinary magnitudes."""
    rng, m = seeded("requantized"), 1440
    q, sf = (rng.integers(0, 256, shape).astype(np.uint8) for shape in ((m, 160), (m, 5)))
    sf[: m // 2] = rng.integers(100, 140, sf[: m // 2].shape)
    assert_defined(ops, q, sf, SPANNED["every_length"], **MODES[mode])


@pytest.mark.parametrize("ends", [[0, 0], [0], []], ids=str)
def test_no_rows(ops: Ops, ends: list[int]) -> None:
    got = ops["requantize_col_fold"](np.zeros((0, 64), np.uint8), np.zeros((0, 2), np.uint8), np.array(ends, np.int32))
    check.same_bytes(got, [np.zeros(shape, np.uint8) for shape in ((64, 0), (spans(0, len(ends)), 64))])


@given(data=st.data())
def test_one_call_changes_no_byte(ops: Ops, data: st.DataObject) -> None:
    """For fp32 values too: bf16 holds every element under every scale that is no extreme."""
    q = data.draw(hnp.arrays(np.uint8, (64, 32)))
    sf = data.draw(hnp.arrays(np.uint8, (64, 1), elements=st.integers(3, 245)))
    ends = np.sort(data.draw(hnp.arrays(np.int32, 3, elements=st.integers(0, 2)))) * np.int32(BLOCK)
    x = ops["dequantize"](q, sf, out_dtype="float32")
    check.same_bytes(ops["requantize_col_fold"](q, sf, ends), ops["fold_groups"](*ops["quantize_col"](x), ends))
