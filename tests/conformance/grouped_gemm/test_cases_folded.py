"""The cases of grouped products of folded operands on every backend."""

from mxep.core_kernels.grouped_gemm.cases import CONFORMANCE

from .. import cases

CASES = {name: case for name, case in CONFORMANCE.items() if "_fold" in case.op}


def test_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
