"""The cases of the layout of scales on every backend."""

from mxep.core_kernels.scale_layout.cases import CONFORMANCE as CASES

from .. import cases


def test_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
