"""The table of cases of tests/gpu, on a CPU: it covers every op, and its inputs are valid."""

import jax
import pytest
from mxep.core_kernels.formats import BLOCK
from mxep.torch_frontend import ops

from ..cases import PRODUCTS
from ..gpu import cases


def test_every_op_has_a_case() -> None:
    assert {case.op for case in cases.CASES.values()} == set(ops.OPS)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_runs_in_both_frontends(name: str) -> None:
    """Products are not compared: on a CPU each framework sums in its own order, and of JAX's product the shapes are
    enough. JAX compiles each number of rows, and takes few rows as it takes many."""
    case = cases.CASES[name]
    for m in (96, *case.edges):
        assert m % BLOCK == 0 or case.multiple == 1
        inputs = case.inputs(m=m)
        got = case.torch(*inputs, m=m)
        if m == 96 and case.op not in PRODUCTS:
            cases.same_bytes(got, case.jax(*inputs, m=m))
        elif m in (0, 96):
            want = jax.eval_shape(case.jitted(m), *map(cases.to_numpy, inputs))
            assert [x.shape for x in want] == [tuple(x.shape) for x in got]
    assert any((a != b).any() for a, b in zip(case.inputs(0), case.inputs(1), strict=True))
