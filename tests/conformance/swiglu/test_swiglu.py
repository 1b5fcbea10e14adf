"""swiglu*, swiglu_bwd*: exact bytes; dprob, a sum in any order, within its error bound."""

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.formats import Rounding
from mxep.core_kernels.swiglu import oracle

from .. import check
from ..backends import INTERPRETER
from ..cases import BF16, GLUS, NUMBERS, ODD_GLUS, RAGGED_GLUS, UNALIGNED_GLUS, Glu

Ops = Mapping[str, Callable]
FORWARD, BACKWARD = ("", "_row", "_row_fold", "_col"), ("", "_row", "_col", "_both", "_all")
NOT_QUANTIZED = (
    dict.fromkeys(RAGGED_GLUS, ("_col", "_both", "_all"))
    | dict.fromkeys(ODD_GLUS, ("_row", "_row_fold", "_col", "_both", "_all"))
    | dict.fromkeys(UNALIGNED_GLUS, ("_row", "_row_fold", "_both", "_all"))
)


def cases(kinds: tuple[str, ...]) -> pytest.MarkDecorator:
    """Every kind with every case that it takes."""
    of_kinds = [
        pytest.param(kind, name, id=f"{kind or 'bf16'}-{name}", marks=[pytest.mark.composed(kind)] * bool(kind))
        for name in GLUS
        for kind in kinds
        if kind not in NOT_QUANTIZED.get(name, ())
    ]
    return pytest.mark.parametrize(("kind", "name"), of_kinds)


MODES = [(rounding, satfinite) for rounding in Rounding for satfinite in (False, True)]


@cache
def expected(op: str, name: str, *mode: object, numbers: str = ""):
    case = GLUS[name]
    return getattr(oracle, op)(*(case.backward if "bwd" in op else case.forward), *mode, **NUMBERS.get(numbers, {}))


def dprob_bound(got: np.ndarray, case: Glu, **numbers: float) -> None:
    """The terms are exact; the order of their sum is not defined."""
    assert (got.shape, got.dtype) == (case.prob.shape, np.float32)
    if len(case.prob):
        with np.errstate(invalid="ignore"):
            terms = oracle.dprob_terms(case.dh, case.gate, case.up, **numbers).astype(np.float64)
            exact = np.where(np.abs(terms.sum(-1)) > np.finfo(np.float32).max, np.inf * terms.sum(-1), terms.sum(-1))
        check.gemm_bound(got, exact, np.abs(terms).sum(-1), terms.shape[1])


@cases(FORWARD)
def test_forward(ops: Ops, kind: str, name: str) -> None:
    check.same_bytes(ops[f"swiglu{kind}"](*GLUS[name].forward), expected(f"swiglu{kind}", name))


@cases(BACKWARD)
def test_backward(ops: Ops, kind: str, name: str) -> None:
    *got, dprob = ops[f"swiglu_bwd{kind}"](*GLUS[name].backward)
    *want, _ = expected(f"swiglu_bwd{kind}", name)
    check.same_bytes(tuple(got), tuple(want))
    dprob_bound(dprob, GLUS[name])


EVERY_KIND = [("", "limit_of_7"), ("_row", "limit_of_7"), ("_row_fold", "limit_of_7"), ("_col", "limit_of_7")]
UNALIGNED = [("", "odd_width"), *(("_col", name) for name in UNALIGNED_GLUS)]
EVERY_GATE = [("_row", "all_gates_shuffled")]
CLAMPED = [("gpt_oss", *case) for case in EVERY_KIND + UNALIGNED + EVERY_GATE]
CLAMPED += [(numbers, *case) for numbers in NUMBERS if numbers != "gpt_oss" for case in EVERY_GATE + EVERY_KIND[:1]]


@pytest.mark.parametrize(("numbers", "kind", "name"), CLAMPED)
def test_other_numbers(ops: Ops, numbers: str, kind: str, name: str) -> None:
    """alpha, limit and offset, on both sides of the limit and for every gate."""
    got = ops[f"swiglu{kind}"](*GLUS[name].forward, **NUMBERS[numbers])
    check.same_bytes(got, expected(f"swiglu{kind}", name, numbers=numbers))
    kind = "_all" if (kind, name) in EVERY_GATE else kind.removesuffix("_fold")
    *got, dprob = ops[f"swiglu_bwd{kind}"](*GLUS[name].backward, **NUMBERS[numbers])
    *want, _ = expected(f"swiglu_bwd{kind}", name, numbers=numbers)
    check.same_bytes(tuple(got), tuple(want))
    dprob_bound(dprob, GLUS[name], **NUMBERS[numbers])


def test_the_numbers_of_silu_are_the_default(ops: Ops) -> None:
    for op in ("swiglu", "swiglu_row"):
        got = ops[op](*GLUS["special_values"].forward, alpha=1.0, limit=0.0, offset=-0.0)
        check.same_bytes(got, expected(op, "special_values"))


def test_nan_is_canonical(ops: Ops) -> None:
    case = GLUS["special_values"]
    dgate, dup, _ = ops["swiglu_bwd"](*case.backward)
    for x in (ops["swiglu"](*case.forward), dgate, dup):
        nan = np.isnan(x.astype(np.float32))
        assert nan.any()
        assert set(x[nan].view(np.uint16).tolist()) == {0x7FC0}


@pytest.mark.parametrize(("rounding", "satfinite"), MODES)
@pytest.mark.parametrize("name", ["normal", pytest.param("special_values", marks=pytest.mark.composed)])
def test_modes(ops: Ops, name: str, rounding: Rounding, satfinite: bool) -> None:
    mode = {"rounding": rounding, "satfinite": satfinite}
    for op in ("swiglu_row", "swiglu_row_fold", "swiglu_col"):
        check.same_bytes(ops[op](*GLUS[name].forward, **mode), expected(op, name, rounding, satfinite))
    for op in ("swiglu_bwd_both", "swiglu_bwd_all"):
        got = ops[op](*GLUS[name].backward, **mode)
        check.same_bytes(got[:-1], expected(op, name, rounding, satfinite)[:-1])


def bf16s(shape: tuple[int, int]) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.uint16, shape, elements=st.integers(0, 2**16 - 1)).map(lambda bits: bits.view(BF16))


@settings(max_examples=2 if INTERPRETER else 25)  # there the ops are composed
@given(data=st.data(), weighted=st.booleans(), rounding=st.sampled_from(Rounding))
def test_fusing_changes_no_byte(ops: Ops, data: st.DataObject, weighted: bool, rounding: Rounding) -> None:
    """swiglu_* gives the bytes of swiglu followed by quantize_*, for any bits of the operands."""
    shape = 32, 96
    dh, gate, up = (data.draw(bf16s(shape)) for _ in range(3))
    bits = hnp.arrays(np.uint32, shape[0] if weighted else 0, elements=st.integers(0, 2**32 - 1))
    prob = data.draw(bits).view(np.float32)
    h = ops["swiglu"](gate, up, prob)
    dgate, dup, _ = ops["swiglu_bwd"](dh, gate, up, prob)
    for kind in FORWARD[1:]:
        check.same_bytes(
            ops[f"swiglu{kind}"](gate, up, prob, rounding=rounding), ops[f"quantize{kind}"](h, rounding=rounding)
        )
    *of_all, _ = ops["swiglu_bwd_all"](dh, gate, up, prob, rounding=rounding)
    *of_both, _ = ops["swiglu_bwd_both"](dh, gate, up, prob, rounding=rounding)
    check.same_bytes(of_all, (*of_both, *ops["swiglu_col"](gate, up, prob, rounding=rounding)))
    for kind in ("_row", "_col", "_both"):
        quantize = ops[f"quantize{kind}"]
        fused = ops[f"swiglu_bwd{kind}"](dh, gate, up, prob, rounding=rounding)[:-1]
        check.same_bytes(fused, (*quantize(dgate, rounding=rounding), *quantize(dup, rounding=rounding)))
