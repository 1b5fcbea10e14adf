"""The definition of blockwise FP8 in numpy: bytes and scales, exact."""

import numpy as np

from ..formats import E4M3_MAX, SMALLEST_SCALE, SQUARE
from ..oracle_math import E4M3_VALUES, Array, Pair, e8m0_value, scale_byte, to_e4m3


def _scale(amax: Array, power_of_two: bool) -> Array:
    """fp32 -> fp32: amax / 448 or the next power of two, at least the smallest scale; NaN unless amax is finite."""
    scale = e8m0_value(scale_byte(amax)).astype(np.float32) if power_of_two else amax / np.float32(E4M3_MAX)
    return np.where(np.isfinite(amax), np.maximum(scale, np.float32(SMALLEST_SCALE)), np.float32(np.nan))


def _quantize(x: Array, sides: tuple[int, ...], power_of_two: bool) -> Pair:
    """x (..., *dims), blocks of `sides` along the last dims."""
    lead, dims = x.shape[: x.ndim - len(sides)], x.shape[x.ndim - len(sides) :]
    counts = [-(-size // side) for size, side in zip(dims, sides, strict=True)]
    padding = [(0, n * side - size) for n, side, size in zip(counts, sides, dims, strict=True)]
    padded = np.pad(x.astype(np.float32), [(0, 0)] * len(lead) + padding)
    blocks = padded.reshape(*lead, *(n for pair in zip(counts, sides, strict=True) for n in pair))
    within = tuple(range(len(lead) + 1, blocks.ndim, 2))
    sf = _scale(np.abs(blocks).max(within, initial=0), power_of_two)
    with np.errstate(invalid="ignore"):
        scaled = blocks * np.expand_dims(np.float32(1) / sf, within)
    q = to_e4m3(scaled.astype(np.float64)).reshape(padded.shape)
    q = np.where(np.isnan(values_of(sf, padded.shape, sides)), np.uint8(0x7F), q)
    return q[(..., *map(slice, dims))], sf


def values_of(sf: Array, shape: tuple[int, ...], sides: tuple[int, ...]) -> Array:
    """sf -> the scale of each value of an array of this shape."""
    for axis, side in zip(range(-len(sides), 0), sides, strict=True):
        sf = np.repeat(sf, side, axis)
    return sf[(..., *map(slice, shape[len(shape) - len(sides) :]))]


def quantize_blockwise(x: Array, power_of_two: bool = False) -> Pair:
    """x (..., K) -> q (..., K), sf (..., ceil(K/128))."""
    return _quantize(x, (SQUARE,), power_of_two)


def quantize_squares(x: Array, power_of_two: bool = False) -> Pair:
    """x (..., N, K) -> q (..., N, K), sf (..., ceil(N/128), ceil(K/128))."""
    return _quantize(x, (SQUARE, SQUARE), power_of_two)


def quantize_squares_both(x: Array, power_of_two: bool = False) -> tuple[Array, Array, Array, Array]:
    """x (..., N, K) -> q, sf of quantize_squares, and both transposed."""
    q, sf = quantize_squares(x, power_of_two)
    return q, sf, np.swapaxes(q, -1, -2), np.swapaxes(sf, -1, -2)


def row_values(q: Array, sf: Array) -> Array:
    """q (..., K), sf (..., ceil(K/128)) -> the exact values in fp64."""
    return E4M3_VALUES[q] * values_of(sf, q.shape, (SQUARE,)).astype(np.float64)


def square_values(q: Array, sf: Array) -> Array:
    """q (..., N, K), sf (..., ceil(N/128), ceil(K/128)) -> the exact values in fp64."""
    return E4M3_VALUES[q] * values_of(sf, q.shape, (SQUARE, SQUARE)).astype(np.float64)
