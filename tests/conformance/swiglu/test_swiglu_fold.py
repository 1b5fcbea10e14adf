"""swiglu_bwd_fold: bitwise equal to the ops that it is composed of; dprob within its error bound."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.cases import BF16, MODES, fixed, seeded
from mxep.core_kernels.fold.cases import COURSES, SPANNED
from mxep.core_kernels.formats import BLOCK, GRADIENT_HEADROOM, SPAN, Rounding, spans
from mxep.core_kernels.swiglu.cases import GLUS, NUMBERS, Glu

from .. import check
from ..backends import INTERPRETER
from .test_swiglu import bf16s

pytestmark = pytest.mark.composed
Ops = Mapping[str, Callable]
Array = np.ndarray
WHOLE = {name: glu for name, glu in GLUS.items() if glu.gate.shape[1] and not any(n % BLOCK for n in glu.gate.shape)}


def _rising(width: int, weighted: bool) -> Glu:
    """1440 rows whose gradients and h have the magnitudes of `COURSES` in every column."""
    dh = COURSES["bf16"][:, :width]
    gate = seeded("rising").standard_normal(dh.shape).astype(BF16)
    prob = seeded("rising").random(len(dh) if weighted else 0).astype(np.float32)
    return Glu(dh, gate, np.roll(dh, 1, 1), prob)


RISING = {(width, weighted): _rising(width, weighted) for width, weighted in ((32, False), (160, True))}


def assert_defined(backend: str, ops: Ops, case: Glu, ends: Array, **options: float) -> None:
    arrays = *case.backward, ends
    got = ops["swiglu_bwd_fold"](*arrays, **options)
    check.as_defined(backend, fixed("swiglu_bwd_fold", *arrays, **options), got)


@pytest.mark.parametrize("numbers", ["", "gpt_oss", pytest.param("limit_alone", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WHOLE)
def test_every_kind_of_value(backend: str, ops: Ops, name: str, numbers: str) -> None:
    """NaN, infinities and zeros, with and without probabilities; an empty group, and rows past the last end."""
    m = len(WHOLE[name].gate)
    ends = [m // 3 // BLOCK * BLOCK] * 2 + [max(m - BLOCK, m // 2) // BLOCK * BLOCK]
    assert_defined(backend, ops, WHOLE[name], np.int32(ends), **NUMBERS.get(numbers, {}))


@pytest.mark.parametrize("ends", SPANNED)
@pytest.mark.parametrize(("width", "weighted"), RISING)
def test_scales_rise_from_span_to_span(backend: str, ops: Ops, width: int, weighted: bool, ends: str) -> None:
    assert_defined(backend, ops, RISING[width, weighted], SPANNED[ends])


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("mode", MODES)
def test_modes(backend: str, ops: Ops, mode: str, numbers: str) -> None:
    ends = np.int32([32, 320, 1024])
    assert_defined(backend, ops, WHOLE["special_values"], ends, **MODES[mode], **NUMBERS[numbers])


@pytest.mark.parametrize("first", ["smaller", "near", "nan", "short"])
def test_rows_with_a_larger_block_beyond_their_first_values(backend: str, ops: Ops, first: str) -> None:
    """Of dgate, of dup, of both and of neither."""
    rng = seeded(f"beyond {first}")
    dh, gate, up = (rng.standard_normal((96, 224 if first == "short" else 608)) for _ in range(3))
    if first == "nan":
        dh[::2, :SPAN] = np.nan
    octaves = np.arange(96) % 8 - (1 if first == "near" else -3)
    up[:32, SPAN:] *= np.exp2(octaves)[:32, None]
    gate[32:64, SPAN:] = 8
    dh[64:, SPAN:] *= np.exp2(octaves)[64:, None]
    case = Glu(*(x.astype(BF16) for x in (dh, gate, up)), rng.random(96).astype(np.float32))
    assert_defined(backend, ops, case, np.int32([32, 64]))


@pytest.mark.parametrize("ends", [[0, 0], [0], []], ids=str)
def test_no_rows(ops: Ops, ends: list[int]) -> None:
    none, prob = np.zeros((0, 64), BF16), np.zeros(0, np.float32)
    *got, dprob = ops["swiglu_bwd_fold"](none, none, none, prob, np.array(ends, np.int32))
    rows, tokens = ((0, 64), (0,)), ((64, 0), (spans(0, len(ends)), 64))
    check.same_bytes(got, [np.zeros(shape, np.uint8) for shape in (*rows, *tokens, *rows, *tokens, *tokens)])
    assert (dprob.shape, dprob.dtype) == ((0,), np.float32)


@settings(max_examples=4 if INTERPRETER else 25)
@given(data=st.data(), weighted=st.booleans(), rounding=st.sampled_from(Rounding))
def test_one_call_changes_no_byte(ops: Ops, data: st.DataObject, weighted: bool, rounding: Rounding) -> None:
    """The bytes of the ops that it is composed of, for any bits of the operands."""
    dh, gate, up = (data.draw(bf16s((64, 32))) for _ in range(3))
    bits = hnp.arrays(np.uint32, 64 if weighted else 0, elements=st.integers(0, 2**32 - 1))
    prob = data.draw(bits).view(np.float32)
    ends = np.sort(data.draw(hnp.arrays(np.int32, 3, elements=st.integers(0, 2)))) * np.int32(BLOCK)
    *got, dprob = ops["swiglu_bwd_fold"](dh, gate, up, prob, ends, rounding=rounding)
    *blocks, _ = ops["swiglu_bwd_all"](dh, gate, up, prob, rounding=rounding)
    folds = ("fold_rows", "fold_groups", "fold_rows", "fold_groups", "fold_groups")
    want = []
    for i, fold in enumerate(folds):
        pair = blocks[2 * i : 2 * i + 2]
        want += ops[fold](*pair, ends) if fold == "fold_groups" else ops[fold](*pair, headroom=GRADIENT_HEADROOM)
    check.same_specified("swiglu_bwd_fold", (dh, gate, up, prob, ends), (*got, dprob), (*want, dprob))
