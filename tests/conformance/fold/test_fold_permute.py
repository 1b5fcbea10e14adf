"""Packed rows folded through a row map, bit for bit: the bytes of the ops which define it."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.cases import MODES, seeded
from mxep.core_kernels.fold.cases import COURSES, SPANNED
from mxep.core_kernels.formats import BLOCK, packed_width, spans
from mxep.core_kernels.quantize import oracle as quantize_oracle

from .. import check
from ..definitions import DEFINITIONS

Ops = Mapping[str, Callable]
Array = np.ndarray


def mapped(rows: int, out_rows: int = 1440) -> Array:
    """Any rows, some several times, and padding."""
    return seeded("mapped").integers(-1, rows, out_rows).astype(np.int32)


def assert_defined(ops: Ops, *arrays: Array, **mode: int) -> None:
    check.same_bytes(ops["permute_mx_col_fold"](*arrays, **mode), DEFINITIONS["permute_mx_col_fold"](*arrays, **mode))


@pytest.mark.parametrize("k", [32, 128, 160])
def test_rows_of_any_bytes(ops: Ops, k: int) -> None:
    """Every code under every scale, NaN among them."""
    packed = seeded("any").integers(0, 256, (40, packed_width(k)), np.uint8)
    packed[7, k:] = 255
    row_map = mapped(40, 96)
    row_map[:2] = 7, -1
    check.same_bytes(ops["permute_mx_fold"](packed, row_map), DEFINITIONS["permute_mx_fold"](packed, row_map))


@pytest.mark.composed
@pytest.mark.parametrize("ends", SPANNED)
@pytest.mark.parametrize("name", COURSES)
def test_scales_rise_from_span_to_span(ops: Ops, name: str, ends: str) -> None:
    """The rows in order, every 37th padding, and 160 columns, whose rows begin at any byte, or 128 or 96."""
    x = COURSES[name][:, :128] if ends == "every_length" else COURSES[name]
    row_map = np.arange(1440, dtype=np.int32)
    row_map[::37] = -1
    assert_defined(ops, quantize_oracle.quantize_row_packed(x), row_map, SPANNED[ends])


@pytest.mark.composed
@pytest.mark.parametrize("mode", MODES)
def test_columns_of_any_bytes(ops: Ops, mode: str) -> None:
    packed = seeded("packed").integers(0, 256, (300, packed_width(128)), np.uint8)
    packed[:150, 128:] = packed[:150, 128:] % 40 + 100
    assert_defined(ops, packed, mapped(300), SPANNED["every_length"], **MODES[mode])


@pytest.mark.parametrize("ends", [[0, 0], [0], []], ids=str)
def test_no_rows(ops: Ops, ends: list[int]) -> None:
    none, group_ends = np.zeros(0, np.int32), np.array(ends, np.int32)
    packed = np.zeros((3, packed_width(128)), np.uint8)
    got = ops["permute_mx_col_fold"](packed, none, group_ends)
    check.same_bytes(got, [np.zeros(shape, np.uint8) for shape in ((128, 0), (spans(0, len(ends)), 128))])
    check.same_bytes(ops["permute_mx_fold"](packed, none), [np.zeros((0, 128), np.uint8), np.zeros(0, np.uint8)])


@given(data=st.data())
def test_one_call_changes_no_byte(ops: Ops, data: st.DataObject) -> None:
    packed = data.draw(hnp.arrays(np.uint8, (9, packed_width(128))))
    row_map = data.draw(hnp.arrays(np.int32, 64, elements=st.integers(-1, 8)))
    ends = np.sort(data.draw(hnp.arrays(np.int32, 3, elements=st.integers(0, 2)))) * np.int32(BLOCK)
    rows = ops["permute_mx"](packed, row_map)
    check.same_bytes(ops["permute_mx_fold"](packed, row_map), ops["fold_rows"](*rows))
    check.same_bytes(ops["permute_mx_col_fold"](packed, row_map, ends), ops["requantize_col_fold"](*rows, ends))
