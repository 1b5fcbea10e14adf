"""The cases of the folds that are composed of other ops in Triton, on every backend.

In Triton's interpreter run one case of each kind of values, all cases without rows, and all of matrices.
"""

import pytest
from mxep.core_kernels.fold.cases import CONFORMANCE

from .. import cases

MATRICES = "quantize_matrix_fold", "quantize_matrix_fold_t"
COMPOSED = (
    *(*MATRICES, "quantize_both_fold", "quantize_blockwise_fold"),
    *("permute_mx_col_fold", "requantize_col_fold"),
)
CASES = {name: case for name, case in CONFORMANCE.items() if case.op in COMPOSED}


def _parameter(name: str) -> object:
    op, kind, *_ = name.split("-")
    runs = op in MATRICES or kind == "no_rows"
    return pytest.param(name, marks=[pytest.mark.needs(op), *([] if runs else [pytest.mark.composed(op, kind)])])


@pytest.mark.parametrize("name", list(map(_parameter, CASES)))
def test_composed_case(backend: str, name: str) -> None:
    cases.compare(backend, CASES[name])
