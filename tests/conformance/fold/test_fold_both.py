"""quantize_both_fold: bitwise equal to the ops that it is composed of."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.formats import BLOCK, Rounding, spans
from mxep.core_kernels.quantize import oracle as quantize_oracle

from .. import check
from ..cases import BF16, QUANTIZE, ROW_ONLY, SPANNED, seeded

pytestmark = pytest.mark.composed
Ops = Mapping[str, Callable]
Array = np.ndarray
MODES = [(rounding, satfinite) for rounding in Rounding for satfinite in (False, True)]
MODE_NAMES = [f"{rounding.name.lower()}{'_satfinite' * satfinite}" for rounding, satfinite in MODES]
SMALL = {name: x for name, x in QUANTIZE.items() if x.ndim == 2 and name not in ROW_ONLY and x.shape[1] % BLOCK == 0}


def _courses(columns: int) -> Array:
    """(1440, columns) fp32. By block, magnitudes are constant, rise by 2 or 2^17 every 8 blocks or by 2^200 at once,
    fall, or are 2^-40 to 2^40 at random. Some columns begin with zeros, NaN or infinity, some have nothing else."""
    rng, block = seeded("courses"), np.arange(1440 // BLOCK)[:, None]
    courses = [block * 0, block // 8 - 5, 17 * (block // 8 - 5), np.where(block < 20, -100, 100), -block]
    courses += [rng.integers(-40, 41, (len(block), columns))]
    octaves = np.choose(np.arange(columns) % len(courses), courses)
    x = (rng.standard_normal((1440, columns)) * np.exp2(octaves).repeat(BLOCK, 0)).astype(np.float32)
    for kind, value in enumerate((0, np.nan, np.inf)):
        x[:, 7 + kind :: 41] = value
        x[:300, 11 + kind :: 41] = value
        x[37::BLOCK, 15 + kind :: 41] = value  # every block but the first
        x[2 * BLOCK : 3 * BLOCK, 20 + kind :: 41] = value
    return x


COURSES = {"bf16": _courses(160).astype(BF16), "f32": _courses(96)}
WIDE = _courses(544).astype(BF16)


def assert_composed(ops: Ops, x: Array, ends: Array, rounding: Rounding, satfinite: bool) -> None:
    got = ops["quantize_both_fold"](x, ends, rounding=rounding, satfinite=satfinite)
    rows = fold_oracle.fold_rows(*quantize_oracle.quantize_row(x, rounding, satfinite))
    columns = fold_oracle.fold_groups(*quantize_oracle.quantize_col(x, rounding, satfinite), ends)
    check.same_bytes(got, (*rows, *columns))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("rounding", "satfinite"), MODES, ids=MODE_NAMES)
def test_every_kind_of_value(ops: Ops, name: str, rounding: Rounding, satfinite: bool) -> None:
    m = len(SMALL[name])
    half = m // 2 // BLOCK * BLOCK
    assert_composed(ops, SMALL[name], np.int32([0, half, half, m]), rounding, satfinite)


@pytest.mark.parametrize("ends", SPANNED)
@pytest.mark.parametrize("name", COURSES)
def test_scales_rise_from_span_to_span(ops: Ops, name: str, ends: str) -> None:
    assert_composed(ops, COURSES[name], SPANNED[ends], Rounding.RCEIL, False)


@pytest.mark.parametrize(("rounding", "satfinite"), MODES, ids=MODE_NAMES)
def test_scales_rise_in_every_mode(ops: Ops, rounding: Rounding, satfinite: bool) -> None:
    assert_composed(ops, WIDE, SPANNED["every_length"], rounding, satfinite)


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
