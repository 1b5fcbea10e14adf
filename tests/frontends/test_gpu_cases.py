"""The table of cases of tests/gpu, on a CPU: it covers every op, and its inputs are valid."""

import jax
import pytest
from mxep.core_kernels.formats import BLOCK
from mxep.torch_frontend import ops

from ..gpu import cases


def test_every_op_has_a_case() -> None:
    assert {case.op for case in cases.CASES.values()} == set(ops.OPS)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_runs_in_both_frontends(name: str) -> None:
    """With the same shapes; tests/conformance has their bytes on a CPU, tests/gpu on a GPU. JAX compiles nothing."""
    case = cases.CASES[name]
    for m in (96, *case.edges):
        assert m % BLOCK == 0 or case.multiple == 1
        inputs = case.inputs(m=m)
        got = case.torch(*inputs, m=m)
        want = jax.eval_shape(case.jitted(m), *map(cases.to_numpy, inputs))
        assert [x.shape for x in want] == [tuple(x.shape) for x in got]
    assert any((a != b).any() for a, b in zip(case.inputs(0), case.inputs(1), strict=True))
