"""The definition of quantization and dequantization in numpy: bytes, exact."""

import numpy as np

from ..formats import BLOCK, Rounding
from ..oracle_math import E4M3_VALUES, Array, Pair, e8m0_value, round_to, scale_byte, to_e4m3


def quantize_blocks(blocks: Array, rounding: Rounding | str, satfinite: bool) -> Pair:
    """blocks (..., B) -> q (..., B), sf (...): one scale for the last dim, of any length."""
    blocks = blocks.astype(np.float32)
    sf = scale_byte(np.abs(blocks).max(-1), rounding, satfinite)
    with np.errstate(invalid="ignore"):
        # byte 255 is a NaN scale and makes the whole block NaN
        return to_e4m3(blocks.astype(np.float64) / e8m0_value(sf)[..., None]), sf


def quantize_row(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Pair:
    """x (..., K) -> q (..., K), sf (..., K/32): one scale per 32 values of the last dim."""
    q, sf = quantize_blocks(x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK), rounding, satfinite)
    return q.reshape(x.shape), sf


def quantize_row_packed(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Array:
    """x (M, K) -> packed rows [q | sf] (M, K + K/32)."""
    return np.concatenate(quantize_row(x, rounding, satfinite), axis=-1)


def quantize_col(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Pair:
    """x (..., M, K) -> q_t (..., K, M), sf_t (..., K, M/32): one scale per 32 values of a column."""
    return quantize_row(np.ascontiguousarray(np.swapaxes(x, -1, -2)), rounding, satfinite)


def quantize_both(
    x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[Array, Array, Array, Array]:
    """x (..., M, K) -> the results of quantize_row and of quantize_col: q, sf, q_t, sf_t."""
    return *quantize_row(x, rounding, satfinite), *quantize_col(x, rounding, satfinite)


def quantize_rowwise(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Pair:
    """x (..., K) -> qf (..., K), row_sf (...): quantize_row with the whole row as one block."""
    return quantize_blocks(x, rounding, satfinite)


def dequantize64(q: Array, sf: Array) -> Array:
    """q (..., K), sf (..., K/32) -> the exact values (..., K) in fp64."""
    return E4M3_VALUES[q] * np.repeat(e8m0_value(sf), BLOCK, axis=-1)


def dequantize(q: Array, sf: Array, out_dtype: str = "bfloat16") -> Array:
    """q (..., K), sf (..., K/32) -> x (..., K)."""
    return round_to(dequantize64(q, sf), out_dtype)
