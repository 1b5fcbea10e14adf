"""block_scales and unblock_scales: exact bytes, and the definition of the layout byte by byte."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxep.core_kernels.cases import seeded
from mxep.core_kernels.scale_layout import oracle

from .. import check

Ops = Mapping[str, Callable]
# ends, rows, scales per row
LAYOUTS = {
    "one_tile": ([128], 128, 4),
    "one_byte": ([1], 1, 1),
    "ragged": ([5, 134, 134, 300], 333, 7),
    "empty_groups": ([0, 0, 128, 128, 129], 129, 5),
    "every_row_past_the_end": ([0, 0], 200, 3),
    "aligned": ([128, 384], 384, 24),
    "no_rows": ([0, 0], 0, 8),
    "wide": ([40, 300], 300, 70),
}


def layout(name: str) -> tuple[np.ndarray, np.ndarray]:
    ends, rows, scales = LAYOUTS[name]
    return seeded(name).integers(1, 256, (rows, scales), np.uint8), np.int32(ends)


@pytest.mark.parametrize("name", LAYOUTS)
def test_there_and_back(ops: Ops, name: str) -> None:
    sf, ends = layout(name)
    blocked = oracle.block_scales(sf, ends)
    check.same_bytes(ops["block_scales"](sf, ends), blocked)
    options = {"num_rows": sf.shape[0], "num_scales": sf.shape[1]}
    noise = seeded("noise").integers(0, 256, blocked.shape, np.uint8)
    check.same_bytes(ops["unblock_scales"](noise, ends, **options), oracle.unblock_scales(noise, ends, **options))
    real = np.where(np.arange(len(sf))[:, None] < ends[-1], sf, 0).astype(np.uint8)
    check.same_bytes(ops["unblock_scales"](blocked, ends, **options), real)


def test_the_byte_of_a_scale(ops: Ops) -> None:
    """cuBLAS: offset (row % 32) * 16 + (row / 32) * 4 + col inside a tile of 128 x 4; tiles in row-major order."""
    sf, ends = layout("ragged")
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
