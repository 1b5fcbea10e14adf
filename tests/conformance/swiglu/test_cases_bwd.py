"""The cases of the gradient of SwiGLU on every backend."""

from mxep.core_kernels.swiglu.cases import CONFORMANCE

from .. import cases

CASES = {name: case for name, case in CONFORMANCE.items() if "_bwd" in case.op}


def test_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
