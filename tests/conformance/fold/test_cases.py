"""The cases of the folds with a kernel of their own, on every backend."""

from mxep.core_kernels.fold.cases import CONFORMANCE

from .. import cases
from .test_cases_composed import COMPOSED

CASES = {name: case for name, case in CONFORMANCE.items() if case.op not in COMPOSED}


def test_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
