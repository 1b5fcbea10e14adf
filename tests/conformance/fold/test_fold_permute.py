"""Packed rows folded through a row map, bit for bit: the bytes of the ops which define it."""

from collections.abc import Callable, Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.formats import BLOCK, packed_width

from .. import check

Ops = Mapping[str, Callable]


@given(data=st.data())
def test_one_call_of_rows_of_any_bytes_changes_no_byte(ops: Ops, data: st.DataObject) -> None:
    packed = data.draw(hnp.arrays(np.uint8, (9, packed_width(128))))
    row_map = data.draw(hnp.arrays(np.int32, 64, elements=st.integers(-1, 8)))
    ends = np.sort(data.draw(hnp.arrays(np.int32, 3, elements=st.integers(0, 2)))) * np.int32(BLOCK)
    rows = ops["permute_mx"](packed, row_map)
    check.same_bytes(ops["permute_mx_fold"](packed, row_map), ops["fold_rows"](*rows))
    arrays, want = (packed, row_map, ends), ops["requantize_col_fold"](*rows, ends)
    check.same_specified("permute_mx_col_fold", arrays, ops["permute_mx_col_fold"](*arrays), want)
