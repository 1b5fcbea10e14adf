"""Both folded operands from two reads of x: every byte is that of the ops which they are composed of."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels import oracle, oracle_folded
from mxep.core_kernels.formats import BLOCK, Rounding

from . import backends, check
from .cases import BF16, QUANTIZE, ROW_ONLY, seeded

Ops = Mapping[str, Callable]
Array = np.ndarray
MODES = [(rounding, satfinite) for rounding in Rounding for satfinite in (False, True)]
MODE_NAMES = [f"{rounding.name.lower()}{'_satfinite' * satfinite}" for rounding, satfinite in MODES]


def columns_of_every_magnitude() -> Array:
    """Column k has blocks 2^-40 to 2^40 apart; where k is a multiple of 5, one of them is NaN, of 7, all are."""
    rng = seeded("columns")
    x = rng.standard_normal((8 * BLOCK, 70)) * np.exp2(
        rng.integers(-40, 41, (8, 1, 70)).repeat(BLOCK, 1).reshape(-1, 70)
    )
    x = x.astype(np.float32)
    x[3 * BLOCK + 4, ::5] = np.nan
    x[::BLOCK, ::7] = np.inf
    return x


def _wide() -> Array:
    return seeded("wide columns").standard_t(2, (64, 1056)).astype(np.float32).astype(BF16)


CASES = {name: x for name, x in QUANTIZE.items() if x.ndim == 2 and name not in ROW_ONLY}
CASES |= {"special_columns": columns_of_every_magnitude(), "more_than_a_power_of_two": _wide()}
WHOLE_ROWS = {name: x for name, x in CASES.items() if x.shape[1] % BLOCK == 0}


def every_ends(m: int) -> list[Array]:
    """One group, none, empty ones, slack past the last end, and one group per block."""
    half = m // 2 // BLOCK * BLOCK
    chosen = [[m], [], [half], [0, 0], list(range(BLOCK, m + 1, BLOCK))]
    return [np.array(ends, np.int32) for ends in chosen]


@pytest.mark.parametrize("name", WHOLE_ROWS)
@pytest.mark.parametrize(("rounding", "satfinite"), [MODES[0], MODES[3]], ids=[MODE_NAMES[0], MODE_NAMES[3]])
def test_rows_and_the_scales_of_columns(ops: Ops, name: str, rounding: Rounding, satfinite: bool) -> None:
    x = WHOLE_ROWS[name]
    got = ops["quantize_row_fold_col_scales"](x, rounding=rounding, satfinite=satfinite)
    check.same_bytes(got, oracle_folded.quantize_row_fold_col_scales(x, rounding, satfinite))
    rows = oracle.fold_rows(*oracle.quantize_row(x, rounding, satfinite))
    check.same_bytes(got, (*rows, oracle.quantize_col(x, rounding, satfinite)[1].T))


def assert_columns_are_folded(ops: Ops, x: Array, ends: Array, rounding: Rounding, satfinite: bool) -> None:
    q_t, sf_t = oracle.quantize_col(x, rounding, satfinite)
    qf_t, group_sf = oracle_folded.fold_groups(q_t, sf_t, ends)
    check.same_bytes(ops["group_scales"](np.ascontiguousarray(sf_t.T), ends), group_sf)
    check.same_bytes(ops["quantize_col_fold"](x, group_sf, ends, rounding=rounding, satfinite=satfinite), qf_t)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rounding", "satfinite"), MODES, ids=MODE_NAMES)
def test_columns_under_the_scales_of_their_groups(ops: Ops, name: str, rounding: Rounding, satfinite: bool) -> None:
    x = CASES[name]
    half = len(x) // 2 // BLOCK * BLOCK
    assert_columns_are_folded(ops, x, np.int32([0, half, half, len(x)]), rounding, satfinite)


@pytest.mark.parametrize("name", ["special_columns", "nan_row", "large_fp32", "one_block", "more_than_a_power_of_two"])
def test_groups_end_anywhere(ops: Ops, name: str) -> None:
    for ends in every_ends(len(CASES[name])):
        assert_columns_are_folded(ops, CASES[name], ends, Rounding.RCEIL, False)


@pytest.mark.parametrize("ends", [[96], [0, 32, 32, 96], [64], [0, 0], []], ids=str)
def test_group_scales_of_any_bytes(ops: Ops, ends: list[int]) -> None:
    rng = seeded("any bytes")
    col_sf, group_ends = rng.integers(0, 256, (4, 300), np.uint8), np.array(ends, np.int32)
    col_sf[:, :200] = rng.choice(np.uint8([0, 1, 254, 255]), (4, 200))
    got = ops["group_scales"](col_sf, group_ends)
    check.same_bytes(got, oracle_folded.group_scales(col_sf, group_ends))
    q = np.zeros((300, 4 * BLOCK), np.uint8)
    check.same_bytes(got, oracle_folded.fold_groups(q, np.ascontiguousarray(col_sf.T), group_ends)[1])


def test_group_scales_of_long_groups(ops: Ops) -> None:
    """Longer than a step of the kernel, and ends between two steps."""
    col_sf = seeded("long").integers(90, 140, (200, 33), np.uint8)
    for ends in ([6400], [32 * 65, 32 * 65, 32 * 199], list(range(0, 6400, 32))):
        group_ends = np.array(ends, np.int32)
        check.same_bytes(ops["group_scales"](col_sf, group_ends), oracle_folded.group_scales(col_sf, group_ends))


def test_of_no_rows_or_no_columns(ops: Ops) -> None:
    ends = np.int32([0, 0])
    check.same_bytes(ops["group_scales"](np.zeros((0, 64), np.uint8), ends), np.zeros((2, 64), np.uint8))
    x, group_sf = np.zeros((0, 64), BF16), np.zeros((2, 64), np.uint8)
    check.same_bytes(ops["quantize_col_fold"](x, group_sf, ends), np.zeros((64, 0), np.uint8))
    x, group_sf = np.zeros((64, 0), BF16), np.zeros((2, 0), np.uint8)
    check.same_bytes(ops["group_scales"](np.zeros((2, 0), np.uint8), ends), group_sf)
    check.same_bytes(ops["quantize_col_fold"](x, group_sf, ends), np.zeros((0, 64), np.uint8))


def test_larger_scales_than_those_of_the_groups(ops: Ops) -> None:
    """By up to what makes every code zero; a NaN stays one."""
    x, ends = columns_of_every_magnitude(), np.int32([64, 224])
    group_sf = oracle_folded.fold_groups(*oracle.quantize_col(x), ends)[1].astype(np.int32)
    larger = np.minimum(group_sf + seeded("larger").integers(0, 40, group_sf.shape), 255).astype(np.uint8)
    check.same_bytes(ops["quantize_col_fold"](x, larger, ends), oracle_folded.quantize_col_fold(x, larger, ends))


@pytest.mark.parametrize("name", backends.NAMES)
@given(data=st.data())
def test_fusing_changes_no_byte(name: str, data: st.DataObject) -> None:
    ops = backends.ops(name)
    x = data.draw(hnp.arrays(np.uint16, (64, 32), elements=st.integers(0, 2**16 - 1))).view(BF16)
    ends = np.sort(data.draw(hnp.arrays(np.int32, 3, elements=st.integers(0, 2)))) * np.int32(BLOCK)
    qf, row_sf, col_sf = ops["quantize_row_fold_col_scales"](x)
    check.same_bytes((qf, row_sf), ops["quantize_row_fold"](x))
    group_sf = ops["group_scales"](col_sf, ends)
    qf_t = ops["quantize_col_fold"](x, group_sf, ends)
    check.same_bytes((qf_t, group_sf), ops["fold_groups"](*ops["quantize_col"](x), ends))
