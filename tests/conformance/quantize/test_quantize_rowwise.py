"""quantize_rowwise, which scales a row as one block: exact bytes."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels import oracle_math
from mxep.core_kernels.formats import BLOCK, Rounding
from mxep.core_kernels.quantize import oracle

from .. import check
from ..cases import BF16, QUANTIZE, seeded

Ops = Mapping[str, Callable]
MODES = [(rounding, satfinite) for rounding in Rounding for satfinite in (False, True)]
MODE_NAMES = [f"{rounding.name.lower()}{'_satfinite' * satfinite}" for rounding, satfinite in MODES]


def _amax_at_every_edge() -> np.ndarray:
    """Each row has another amax, at or next to 448 * 2^e or 2^e, from fp32's smallest to its largest value."""
    with np.errstate(over="ignore"):
        powers = np.concatenate([np.ldexp(np.float32(top), np.arange(-158, 128)) for top in (448, 1)])
    edges = np.nextafter(np.stack([powers] * 3), np.float32([[0], [0], [np.inf]]))
    edges[1] = powers
    edges = np.abs(edges[np.isfinite(edges)])
    x = edges[:, None] * seeded("edges").uniform(-1, 1, (len(edges), 3 * BLOCK)).astype(np.float32)
    x[:, 70] = -edges  # in the last block of the three
    return x


def _one_huge_value() -> np.ndarray:
    """Next to it the other values are E4M3 subnormals or less; the last row has one value of each magnitude."""
    x = seeded("huge").standard_normal((40, 96)).astype(np.float32)
    x[np.arange(40), np.arange(40) * 2] = np.ldexp(np.float32(1), np.arange(40) * 3)
    x[-1] = np.ldexp(np.float32(-1), np.arange(96) - 80)
    return x


def _special_rows() -> np.ndarray:
    """Between ordinary rows, one row each with a NaN, an infinity, both, zeros of one sign, subnormals, the largest."""
    x = seeded("special").standard_normal((15, 64)).astype(np.float32)
    x[1, 40], x[3, 0], x[5, 63] = np.nan, np.inf, -np.inf
    x[7, :2] = np.nan, np.inf
    x[9], x[11, :] = -0.0, np.uint32(3).view(np.float32)
    x[13] = np.copysign(np.finfo(np.float32).max, x[13])
    x[14, :33] = 0
    return x


ROWS = {
    "amax_at_every_edge": _amax_at_every_edge(),
    "one_huge_value": _one_huge_value(),
    "special_rows": _special_rows(),
    "special_rows_bf16": _special_rows().astype(BF16),
    "zeros_of_both_signs": np.tile(np.float32([0.0, -0.0]), (2, 32)),
    "more_than_a_power_of_two": seeded("wide").standard_normal((3, 1056)).astype(BF16),
    "wide": seeded("wider").standard_t(2, (2, 7168)).astype(np.float32),
}
CASES = QUANTIZE | ROWS


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rounding", "satfinite"), MODES, ids=MODE_NAMES)
def test_quantize_rowwise(ops: Ops, name: str, rounding: Rounding, satfinite: bool) -> None:
    got = ops["quantize_rowwise"](CASES[name], rounding=rounding, satfinite=satfinite)
    check.same_bytes(got, oracle.quantize_rowwise(CASES[name], rounding, satfinite))


@pytest.mark.parametrize("rounding", Rounding, ids=lambda r: r.name.lower())
def test_every_bf16_in_rows_that_share_its_scale(ops: Ops, rounding: Rounding) -> None:
    """All values with one exponent in one row of 128, and with 1.0 among them, under which half of them vanish."""
    rows = np.arange(2**16, dtype=np.uint16).reshape(512, 128).view(BF16)
    for x in (rows, np.concatenate([rows, np.ones((512, 32), BF16)], axis=1)):
        check.same_bytes(ops["quantize_rowwise"](x, rounding=rounding), oracle.quantize_rowwise(x, rounding))


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
