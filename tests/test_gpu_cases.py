"""The table of cases behind tests/gpu, on a CPU: it covers every op, and its inputs are valid."""

import importlib.util
import sys
from pathlib import Path

import pytest
from mxep.core_kernels.formats import BLOCK
from mxep.torch_frontend import ops

SPEC = importlib.util.spec_from_file_location("gpu_cases_on_the_cpu", Path(__file__).parent / "gpu" / "cases.py")
assert SPEC
assert SPEC.loader
cases = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = cases
SPEC.loader.exec_module(cases)

OF_FRAMEWORKS = {name for name in ops.OPS if name.startswith("grouped_")}


def test_every_op_has_a_case() -> None:
    assert {case.op for case in cases.CASES.values()} == set(ops.OPS)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_runs_in_both_frontends(name: str) -> None:
    """Grouped products are not compared: on a CPU each framework sums in its own order."""
    case = cases.CASES[name]
    for m in (96, *case.edges):
        assert m % BLOCK == 0 or case.multiple == 1
        inputs = case.inputs(m=m)
        got, want = case.torch(*inputs, m=m), case.jax(*inputs, m=m)
        if case.op not in OF_FRAMEWORKS:
            cases.same_bytes(got, want)
    assert any((a != b).any() for a, b in zip(case.inputs(0), case.inputs(1), strict=True))
