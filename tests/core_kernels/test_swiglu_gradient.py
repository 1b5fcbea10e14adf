"""The table of ops of SwiGLU's backward: an op writes what is needed, and its outputs are the registry's."""

from itertools import product
from typing import get_args

import pytest
from mxep.core_kernels.launch import ArrayType
from mxep.core_kernels.policy.recipe import Form
from mxep.core_kernels.policy.swiglu_gradient import PARTS, Needs, gradient_op
from mxep.core_kernels.registry import OPS

NEEDS = [Needs._make(flags) for flags in product((False, True), repeat=4)]


@pytest.mark.parametrize("quantized_tokens", [False, True])
@pytest.mark.parametrize("form", get_args(Form))
def test_an_op_writes_the_operands_that_are_needed(form: Form, quantized_tokens: bool) -> None:
    for needs in NEEDS:
        op = gradient_op(form, quantized_tokens, needs)
        if op == "swiglu_bwd":
            apart = form not in ("mx", "fold") or needs.values or (needs.tokens and not quantized_tokens)
            assert apart or not (needs.rows or needs.tokens), needs
            continue
        written = PARTS[op]
        assert ("gate_rows" in written, "gate_tokens" in written) == (needs.rows, needs.tokens), needs
        assert "hidden" not in written or needs.hidden, needs
        assert (op == "swiglu_bwd_fold") == (form == "fold" and needs.rows and needs.tokens and needs.hidden), needs


@pytest.mark.parametrize("op", PARTS)
def test_parts_are_named_in_the_order_of_the_outputs(op: str) -> None:
    *outputs, last = OPS[op].outputs
    assert last == "dprob"
    assert len(outputs) == 2 * len(PARTS[op])
    for name, values, scales in zip(PARTS[op], outputs[::2], outputs[1::2], strict=True):
        result = {"gate": "dgate", "up": "dup", "hidden": "h"}[name.partition("_")[0]]
        along_tokens = not name.endswith("_rows")
        assert values.startswith(f"{result}_q"), (values, name)
        assert values.endswith("_t") == along_tokens, (values, name)
        assert scales.startswith(f"{result}_"), (scales, name)


@pytest.mark.parametrize("op", [name for name, of in OPS.items() if "gate" in of.inputs])
def test_a_gate_without_dims_is_an_error_of_its_rank(op: str) -> None:
    kinds = {"gate": ((), "bfloat16"), "prob": ((64,), "float32"), "group_ends": ((0,), "int32")}
    inputs = [ArrayType(*kinds.get(name, ((64, 64), "bfloat16"))) for name in OPS[op].inputs]
    with pytest.raises((ValueError, TypeError), match=f"^{op}: "):
        OPS[op].signature(*inputs)
