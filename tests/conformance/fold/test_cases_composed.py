"""The cases of the folds that are composed of other ops in Triton, on every backend.

In Triton's interpreter run one case of each kind of values, all cases without rows, and all of quantize_matrix_fold.
"""

import pytest
from mxep.core_kernels.fold.cases import CONFORMANCE

from .. import cases

COMPOSED = (
    "quantize_both_fold",
    "quantize_blockwise_fold",
    "quantize_matrix_fold",
    "permute_mx_col_fold",
    "requantize_col_fold",
)
CASES = {name: case for name, case in CONFORMANCE.items() if case.op in COMPOSED}


def _parameter(name: str) -> object:
    op, kind, *_ = name.split("-")
    runs = op == "quantize_matrix_fold" or kind == "no_rows"
    return pytest.param(name, marks=[pytest.mark.needs(op), *([] if runs else [pytest.mark.composed(op, kind)])])


@pytest.mark.parametrize("name", list(map(_parameter, CASES)))
def test_composed_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
