"""The cases of permutations on every backend."""

from mxep.core_kernels.permute.cases import CONFORMANCE as CASES

from .. import cases


def test_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
