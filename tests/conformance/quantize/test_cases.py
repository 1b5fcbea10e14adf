"""The cases of MXFP8 quantization on every backend."""

from mxep.core_kernels.quantize.cases import CONFORMANCE

from .. import cases
from .test_cases_fp8 import FP8

CASES = {name: case for name, case in CONFORMANCE.items() if not case.op.startswith(FP8)}


def test_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
