"""swiglu*, swiglu_bwd*: defaults, NaN, and the ops that they fuse."""

from collections.abc import Callable, Mapping

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mxep.core_kernels.cases import BF16
from mxep.core_kernels.formats import Rounding
from mxep.core_kernels.swiglu import oracle
from mxep.core_kernels.swiglu.cases import GLUS

from .. import check
from ..backends import INTERPRETER

Ops = Mapping[str, Callable]


def test_the_numbers_of_silu_are_the_default(ops: Ops) -> None:
    for op in ("swiglu", "swiglu_row"):
        got = ops[op](*GLUS["special_values"].forward, alpha=1.0, limit=0.0, offset=-0.0)
        check.same_bytes(got, getattr(oracle, op)(*GLUS["special_values"].forward))


def test_nan_is_canonical(ops: Ops) -> None:
    case = GLUS["special_values"]
    dgate, dup, _ = ops["swiglu_bwd"](*case.backward)
    for x in (ops["swiglu"](*case.forward), dgate, dup):
        nan = np.isnan(x.astype(np.float32))
        assert nan.any()
        assert set(x[nan].view(np.uint16).tolist()) == {0x7FC0}


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
    for kind in ("_row", "_row_fold", "_col"):
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
