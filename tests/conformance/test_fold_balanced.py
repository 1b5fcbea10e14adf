"""balance_scales and fold_rows_balanced: exact bytes; the product that they leave; and the dB of outlier channels."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from mxep.core_kernels import oracle_math
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.fold import oracle_balanced as oracle
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.grouped_gemm import oracle_folded
from mxep.core_kernels.quantize import oracle as quantize_oracle

from . import check
from .cases import BF16, seeded
from .test_fold import every_shift

Ops = Mapping[str, Callable]
Array = np.ndarray


def scales(*shape: int, low: int = 0, high: int = 256) -> Array:
    return seeded(f"scales {shape} {low}").integers(low, high, shape, np.uint8)


def _columns_without_a_scale() -> Array:
    """Of zeros, of NaN, of both; zeros beside scales."""
    sf = scales(2, 5, 6, low=100, high=140)
    sf[:, :, 0], sf[:, :, 1], sf[:, :, 2], sf[0, 2:, 3] = 0, 255, 0, 0
    sf[:, 1, 2] = 255
    return sf


WEIGHT_SCALES = {
    "any": scales(3, 37, 9),
    "near": scales(2, 40, 33, low=100, high=130),
    "columns_without_a_scale": _columns_without_a_scale(),
    "one": np.uint8([[[7]]]),
    "no_rows": scales(2, 0, 3),
    "no_groups": scales(0, 4, 3),
}


@pytest.mark.parametrize("name", WEIGHT_SCALES)
def test_balance_scales(ops: Ops, name: str) -> None:
    check.same_bytes(ops["balance_scales"](WEIGHT_SCALES[name]), oracle.balance_scales(WEIGHT_SCALES[name]))


def test_every_block_gets_the_largest_scale_of_its_group(ops: Ops) -> None:
    balanced, lift = ops["balance_scales"](np.uint8([[[127, 100, 0], [90, 113, 0]], [[3, 255, 0], [2, 9, 0]]]))
    np.testing.assert_array_equal(balanced, [[[127, 114, 0], [90, 127, 0]], [[9, 255, 0], [8, 9, 0]]])
    np.testing.assert_array_equal(lift, [[0, 14, 0], [6, 0, 0]])


@pytest.mark.parametrize("ends", [[4096], [0, 1000, 1000, 3000], [], [0, 0]], ids=str)
def test_fold_every_element_by_every_shift(ops: Ops, ends: list[int]) -> None:
    (q, sf), group_ends = every_shift(), np.int32(ends)
    lift = scales(len(ends), 3, high=60)
    got = ops["fold_rows_balanced"](q, sf, lift, group_ends)
    check.same_bytes(got, oracle.fold_rows_balanced(q, sf, lift, group_ends))


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (37, 544)])
def test_shapes(ops: Ops, shape: tuple[int, int]) -> None:
    q, sf = scales(*shape), scales(shape[0], shape[1] // BLOCK, low=100, high=140)
    lift, ends = scales(3, shape[1] // BLOCK, high=20), np.int32([shape[0] // 3, shape[0] // 3, shape[0]])
    check.same_bytes(ops["fold_rows_balanced"](q, sf, lift, ends), oracle.fold_rows_balanced(q, sf, lift, ends))


def test_without_lift_it_is_fold_rows(ops: Ops) -> None:
    q, sf = every_shift()
    got = ops["fold_rows_balanced"](q, sf, np.zeros((1, 3), np.uint8), np.int32([len(q)]))
    check.same_bytes(got, fold_oracle.fold_rows(q, sf))


def test_a_scale_below_the_smallest(ops: Ops) -> None:
    """The row's scale is at least 0; values below it vanish. NaN blocks have no lift."""
    q = np.full((2, 2 * BLOCK), 0x38, np.uint8)
    qf, row_sf = ops["fold_rows_balanced"](q, np.uint8([[10, 13], [255, 255]]), np.uint8([[12, 40]]), np.int32([2]))
    np.testing.assert_array_equal(row_sf, [0, 255])
    np.testing.assert_array_equal(qf[:, ::BLOCK], [[0x28, 0], [0x7F, 0x7F]])


def balanced_operands(ops: Ops, x: Array, w: Array, ends: Array) -> tuple[Array, ...]:
    q, sf = quantize_oracle.quantize_row(w)
    balanced_sf, lift = ops["balance_scales"](sf)
    rows = ops["fold_rows_balanced"](*quantize_oracle.quantize_row(x), lift, ends)
    return *rows, *fold_oracle.fold_rows(q, balanced_sf)


def test_products_do_not_change(ops: Ops) -> None:
    """Values that the fold keeps: powers of two, of channels that differ by 2^12 in x and in w."""
    rng, ends = seeded("unchanged"), np.int32([20, 20, 50])
    octaves = np.repeat(rng.integers(-12, 1, 4), BLOCK)
    x = (rng.choice([-1.0, 1.0], (50, 128)) * np.exp2(-octaves)).astype(np.float32)
    w = (rng.choice([-1.0, 1.0], (3, 16, 128)) * np.exp2(octaves)).astype(np.float32)
    got = oracle_folded.grouped_mm_fold(*balanced_operands(ops, x, w, ends), ends, "float64")
    want = [x[:20].astype(np.float64) @ w[0].T, x[20:].astype(np.float64) @ w[2].T]
    np.testing.assert_array_equal(got, np.concatenate(want))


@pytest.mark.parametrize("octaves", [12, 16, 24])
def test_channels_of_large_activations_and_small_weights(ops: Ops, octaves: int) -> None:
    """32 of 1024 channels. The folded product by row is at 28.0, 10.6 and 0 dB from full precision. Balanced it is
    where MXFP8 is, measured 28.4 dB, less 0.3."""
    rng, ends = seeded("outliers"), np.int32([64])
    x, w = rng.standard_normal((64, 1024)), rng.standard_normal((1, 64, 1024))
    x[:, 32:64] *= 2.0**octaves
    w[..., 32:64] *= 2.0**-octaves
    x, w = x.astype(BF16), w.astype(BF16)
    exact = x.astype(np.float64) @ w[0].astype(np.float64).T
    operands = balanced_operands(ops, x, w, ends)
    assert check.sqnr_db(oracle_folded.grouped_mm_fold(*operands, ends, "float64"), exact) >= 28.1
    assert (oracle_math.E4M3_VALUES[operands[0]] != 0).mean() > 0.99
