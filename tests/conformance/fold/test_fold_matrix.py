"""quantize_matrix_fold: bitwise equal to the ops that it is composed of, with the headroom of weights."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels.cases import BF16, MODES, normal, seeded
from mxep.core_kernels.fold.cases import COURSES
from mxep.core_kernels.quantize.cases import MATRICES

from .. import check
from ..definitions import DEFINITIONS

Ops = Mapping[str, Callable]
Array = np.ndarray
KINDS = ("all_bf16_shuffled", "random_bits_fp32", "nan_signs_and_inf", "smallest_subnormals", "signed_zeros")


def assert_composed(ops: Ops, x: Array, **mode: int) -> None:
    check.same_bytes(ops["quantize_matrix_fold"](x, **mode), DEFINITIONS["quantize_matrix_fold"](x, **mode))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_value(ops: Ops, name: str, mode: str) -> None:
    assert_composed(ops, MATRICES[name], **MODES[mode])


@pytest.mark.parametrize("name", COURSES)
def test_scales_that_differ_along_a_column(ops: Ops, name: str) -> None:
    assert_composed(ops, COURSES[name])


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "f32"])
def test_a_matrix_takes_no_scale_of_its_neighbours(ops: Ops, dtype: type) -> None:
    """Three matrices of other magnitudes, with rows, columns and a whole matrix of NaN."""
    x = normal(seeded("matrices"), (4, 96, 160)) * np.exp2([-20, 0, 30, 0]).reshape(4, 1, 1)
    x[0, 5], x[1, :, 9], x[3] = np.nan, np.nan, np.nan
    x[2, 33, 70] = np.inf
    assert_composed(ops, x.astype(dtype))


def beyond_the_first_span(name: str) -> Array:
    """(2, 544, 320): rows and columns whose largest block is not among their first 256 values."""
    x = normal(seeded(name), (2, 544, 320))
    if name == "some":
        x[0, 300, 300], x[1, 3, 319], x[1, 543, 5] = 1e3, -1e4, 20
    elif name == "all":
        x[:, :256] /= 64
        x[:, :, :256] /= 64
    elif name == "first span of NaN":
        x[:, :256, 40:], x[:, 40:, :256] = np.nan, np.nan
    else:  # the first span decides, with and without its headroom
        x[:, :, 256:] *= np.exp2(np.arange(544) % 4 - 1)[:, None]
    return x.astype(BF16)


@pytest.mark.parametrize("name", ["some", "all", "first span of NaN", "near"])
def test_lines_with_a_larger_block_beyond_their_first_span(ops: Ops, name: str) -> None:
    assert_composed(ops, beyond_the_first_span(name))


def test_no_matrices(ops: Ops) -> None:
    got = ops["quantize_matrix_fold"](np.zeros((0, 32, 64), BF16))
    check.same_bytes(got, [np.zeros(shape, np.uint8) for shape in ((0, 32, 64), (0, 32), (0, 64, 32), (0, 64))])
