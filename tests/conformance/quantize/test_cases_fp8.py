"""The cases of rowwise and blockwise FP8 quantization on every backend."""

from mxep.core_kernels.quantize.cases import CONFORMANCE

from .. import cases

FP8 = ("quantize_rowwise", "quantize_blockwise", "quantize_squares")
CASES = {name: case for name, case in CONFORMANCE.items() if case.op.startswith(FP8)}


def test_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
