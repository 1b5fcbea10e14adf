"""The cases of the router, of routing and of the combine on every backend."""

from mxep.core_kernels.combine import cases as combine
from mxep.core_kernels.router import cases as router
from mxep.core_kernels.routing import cases as routing

from .. import cases

CASES = router.CONFORMANCE | routing.CONFORMANCE | combine.CONFORMANCE


def test_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
