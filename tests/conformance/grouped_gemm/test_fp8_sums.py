"""Sums of Hopper's FP8 tensor cores: exact bytes of oracle_sm90.py. On a CPU the ops are held to the bound.

Subnormal codes with a few ones are 2^-8 of sum|a||b| off on a tensor core, more than `check.FP8_CHAIN`.
"""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.grouped_gemm.folded import oracle as oracle_folded

from .. import check
from ..backends import INTERPRETER
from .fp8_sums import KINDS, operands

Ops = Mapping[str, Callable]
pytestmark = pytest.mark.needs("grouped_mm_fold", "grouped_wgrad_fold")
kinds = pytest.mark.parametrize("name", ["wide"] if INTERPRETER else KINDS)


@kinds
@pytest.mark.parametrize("first", [44, 140])
def test_a_product(backend: str, ops: Ops, name: str, first: int) -> None:
    """Rows and columns of several tiles; two groups, of which the second has other scales. 44 rows and 136 columns are
    in one tile of 128 x 256, 140 rows in two of 256 x 128."""
    a, b = operands(name, 300, 2 * 136, 416)
    rhs, ends = b.reshape(2, 136, -1), np.int32([first, 300])
    scales = np.resize(np.uint8([127, 120, 135]), 300), np.resize(np.uint8([127, 126, 130, 140]), (2, 136))
    arguments = a, scales[0], rhs, scales[1], ends
    got = ops["grouped_mm_fold"](*arguments, out_dtype="float32")
    exact = oracle_folded.grouped_mm_fold(*arguments, "float64")
    magnitude = oracle_folded.grouped_mm_fold(a & 0x7F, scales[0], rhs & 0x7F, scales[1], ends, "float64")
    check.fp8_sums(backend, "grouped_mm_fold", got, *arguments)
    if not check.fp8_chain(backend):
        check.gemm_bound(got, exact, magnitude, a.shape[1])


@kinds
def test_a_weight_gradient(backend: str, ops: Ops, name: str) -> None:
    """Groups of many spans, of part of a stage, and none; scales that rise from span to span."""
    a, b = operands(name, 264, 136, 1440)
    ends = np.int32([0, 32, 256, 800, 1376])
    slots = 1440 // 256 + len(ends)
    scales = [np.resize(np.uint8([[120], [121], [125]]), (slots, len(x))) for x in (a, b)]
    for sf in scales:
        sf[:] = np.maximum.accumulate(sf + np.arange(slots, dtype=np.uint8)[:, None] // 3, 0)
    arguments = a, scales[0], b, scales[1], ends
    got = ops["grouped_wgrad_fold"](*arguments, out_dtype="float32")
    exact = oracle_folded.grouped_wgrad_fold(*arguments, "float64")
    magnitude = oracle_folded.grouped_wgrad_fold(a & 0x7F, scales[0], b & 0x7F, scales[1], ends, "float64")
    check.fp8_sums(backend, "grouped_wgrad_fold", got, *arguments)
    if not check.fp8_chain(backend):
        check.gemm_bound(got, exact, magnitude, 576)


@pytest.mark.parametrize("begin", [0, 32, 64, 96])
def test_weight_gradients_from_any_token(backend: str, ops: Ops, begin: int) -> None:
    """Groups of one step to several stages, each of which begins at every multiple of 32 within a stage."""
    a, b = operands("wide", 264, 136, 1248)
    ends = begin + np.cumsum([0, 96, 128, 160, 32, 288, 416], dtype=np.int32)
    slots = 1248 // 256 + len(ends)
    arguments = a, np.full((slots, 264), 127, np.uint8), b, np.full((slots, 136), 126, np.uint8), ends
    got = ops["grouped_wgrad_fold"](*arguments, out_dtype="float32")
    exact = oracle_folded.grouped_wgrad_fold(*arguments, "float64")
    magnitude = oracle_folded.grouped_wgrad_fold(a & 0x7F, arguments[1], b & 0x7F, *arguments[3:], "float64")
    check.fp8_sums(backend, "grouped_wgrad_fold", got, *arguments)
    if not check.fp8_chain(backend):
        check.gemm_bound(got, exact, magnitude, 416)
