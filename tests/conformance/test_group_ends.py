"""Ops that take group ends for rows past which they compute nothing: the definition up to the last end."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.cases import Case, fixed

from ..cases import FIRST
from . import check
from .backends import KERNEL_OPS
from .cases import marks

CASES: dict[str, Case] = {name: FIRST[name] for name, op in KERNEL_OPS.items() if op.optional_ends}
ENDS = {"in_a_tile": [32, 32, 41], "at_the_last_row": [17, 96], "no_rows": [0, 0]}
named = pytest.mark.parametrize("name", [pytest.param(name, marks=marks(case)) for name, case in CASES.items()])


@named
@pytest.mark.parametrize("ends", ENDS)
def test_rows_up_to_the_last_end(backend: str, ops: Mapping[str, Callable], name: str, ends: str) -> None:
    arrays, options = (*CASES[name].arrays(), np.int32(ENDS[ends])), CASES[name].options_of()
    check.as_defined(backend, fixed(name, *arrays, **options), ops[name](*arrays, **options))
