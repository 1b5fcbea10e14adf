"""The dense layer against its definition: fp64 sums of the quantized operands, within the bound of a product."""

import pytest

from .. import check
from ..backends import adapter
from .layers import RUNS
from .linear import CASES, RUN_CASES


@pytest.mark.needs("linear")
@pytest.mark.parametrize(("name", "run"), RUN_CASES)
def test_the_result_and_every_gradient(backend: str, name: str, run: str) -> None:
    """An operand with one wrong scale is off by a factor of 2 in 32 of the products that a bound counts."""
    case, form = CASES[name], RUNS[run].form("cpu")
    got = adapter(backend).linear(case.x, case.w, case.bias, case.dout, RUNS[run])
    bounds = case.bounds(run)
    assert got.keys() == bounds.keys()
    for of, bound in bounds.items():
        fp8 = form in check.FP8_FORMS and of != "bias" and (of != "w" or RUNS[run].wgrad_mx)
        assert got[of].dtype == case.x.dtype
        check.gemm_bound(got[of], *bound, chain=check.fp8_chain(backend) if fp8 else 0)
