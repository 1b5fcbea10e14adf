"""quantize_rowwise, which scales a row as one block: its properties."""

from collections.abc import Callable, Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels import oracle_math
from mxep.core_kernels.formats import BLOCK

from ...compare import BF16
from .. import check

Ops = Mapping[str, Callable]


def test_a_nan_changes_its_row_alone(ops: Ops) -> None:
    x = np.ones((3, 2 * BLOCK), np.float32)
    x[1, 40] = np.nan
    qf, row_sf = ops["quantize_rowwise"](x)
    np.testing.assert_array_equal(row_sf, [119, 255, 119])  # 1 = 2^8 * 2^-8
    np.testing.assert_array_equal(qf, np.repeat(np.uint8([[0x78], [0x7F], [0x78]]), 2 * BLOCK, axis=1))


@given(data=st.data())
def test_agrees_with_the_ops_that_scale_blocks(ops: Ops, data: st.DataObject) -> None:
    """A row of one block is `quantize_row`'s; the scale of a finite row is `quantize_row_fold`'s."""
    x = data.draw(hnp.arrays(np.uint16, (8, 96), elements=st.integers(0, 2**16 - 1))).view(BF16)
    blocks = np.ascontiguousarray(x[:, :BLOCK])
    q, sf = ops["quantize_row"](blocks)
    check.same_bytes(ops["quantize_rowwise"](blocks), (q, sf[:, 0]))
    # above 2^127 E4M3 may round a value to 2^128, which fp32 does not hold
    finite = np.where(np.abs(x.astype(np.float32)) < 2.0**127, x, BF16.type(1))
    qf, row_sf = ops["quantize_rowwise"](finite)
    np.testing.assert_array_equal(row_sf, ops["quantize_row_fold"](finite)[1])
    values = (oracle_math.E4M3_VALUES[qf] * oracle_math.e8m0_value(row_sf)[:, None]).astype(np.float32)
    again, again_sf = ops["quantize_rowwise"](values)
    np.testing.assert_array_equal(oracle_math.E4M3_VALUES[again] * oracle_math.e8m0_value(again_sf)[:, None], values)
