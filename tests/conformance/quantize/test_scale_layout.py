"""block_scales and unblock_scales: the definition of the layout byte by byte, and groups of any sizes."""

from collections.abc import Callable, Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mxep.core_kernels.scale_layout import oracle
from mxep.core_kernels.scale_layout.cases import LAYOUTS

from .. import check

Ops = Mapping[str, Callable]


def test_the_byte_of_a_scale(ops: Ops) -> None:
    """cuBLAS: offset (row % 32) * 16 + (row / 32) * 4 + col inside a tile of 128 x 4; tiles in row-major order."""
    sf, ends = LAYOUTS["ragged"]
    flat = ops["block_scales"](sf, ends).reshape(-1)
    want = np.zeros_like(flat)
    start, top = 0, 0
    for end in ends:
        for row in range(start, end):
            r = top + row - start
            for col in range(7):
                tile = r // 128 * 2 + col // 4
                want[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + col % 4] = sf[row, col]
        top += (end - start + 127) // 128 * 128
        start = end
    np.testing.assert_array_equal(flat, want)


@given(ends=st.lists(st.integers(0, 400), min_size=4, max_size=4).map(sorted), seed=st.integers(0, 99))
def test_any_groups_come_back(ops: Ops, ends: list[int], seed: int) -> None:
    group_ends = np.int32(ends)
    sf = np.random.default_rng(seed).integers(0, 256, (400, 6), np.uint8)
    blocked = ops["block_scales"](sf, group_ends)
    check.same_bytes(blocked, oracle.block_scales(sf, group_ends))
    sf[ends[-1] :] = 0
    check.same_bytes(ops["unblock_scales"](blocked, group_ends, num_rows=400, num_scales=6), sf)
