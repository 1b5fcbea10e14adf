"""The definition of the folds in numpy. Bytes are exact, up to the last group end; what is past it is unspecified."""

import numpy as np

from ..formats import BLOCK, E8M0_NAN, HEADROOM, SPAN, WEIGHT_HEADROOM, Rounding, spans
from ..oracle_math import E4M3_VALUES, Array, Pair, e8m0_value, group_slices, to_e4m3
from ..permute.oracle import permute_mx
from ..quantize.oracle import dequantize, quantize_col, quantize_row
from ..quantize.oracle_blockwise import quantize_blockwise


def fold_rows(q: Array, sf: Array, headroom: int = 0) -> Pair:
    """q (..., K), sf (..., K/32) -> qf (..., K), row_sf (...): all blocks with the row's largest scale.

    With a headroom, every block first gets at least the largest scale of the first SPAN values times 2^headroom, up to
    byte 254. A NaN block (byte 255) is ignored when scales are chosen and becomes elements 0x7F. A row of NaN blocks
    has scale 255.
    """
    if headroom:
        q, sf = _raise_scales(q, sf, headroom)
    largest = _scales(sf).max(-1)
    row_sf = np.where(largest < 0, E8M0_NAN, largest).astype(np.uint8)
    return _fold(q, sf, largest[..., None]), row_sf


def _scales(sf: Array) -> Array:
    """Scale bytes as int32, -1 for NaN."""
    return np.where(sf == E8M0_NAN, -1, sf.astype(np.int32))


def _fold(q: Array, sf: Array, target: Array) -> Array:
    """Codes under the scale `target`, which is not smaller than sf."""
    factor = np.where(sf == E8M0_NAN, np.nan, np.ldexp(1.0, sf.astype(np.int32) - target))
    return to_e4m3(E4M3_VALUES[q] * np.repeat(factor, BLOCK, axis=-1))


def _raise_scales(q: Array, sf: Array, headroom: int) -> Pair:
    scales = _scales(sf)
    first = scales[..., : SPAN // BLOCK].max(-1, keepdims=True)
    least = np.where(first < 0, -1, np.minimum(first + headroom, E8M0_NAN - 1))
    raised = np.maximum(scales, least)
    return _fold(q, sf, raised), np.where(sf == E8M0_NAN, E8M0_NAN, raised).astype(np.uint8)


def quantize_row_fold(
    x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False, headroom: int = 0
) -> Pair:
    """x (..., K) -> qf (..., K), row_sf (...)."""
    return fold_rows(*quantize_row(x, rounding, satfinite), headroom)


def span_slices(group_ends: Array) -> list[list[tuple[int, slice]]]:
    """Each group's spans in order: the slot of the span's scales, and its tokens."""
    return [
        [
            (group.start // SPAN + g + i, slice(begin, min(begin + SPAN, group.stop)))
            for i, begin in enumerate(range(group.start, group.stop, SPAN))
        ]
        for g, group in enumerate(group_slices(group_ends))
    ]


def span_values(qf: Array, span_sf: Array, group_ends: Array) -> Array:
    """qf (R, M), span_sf (S, R) -> the values (R, M); columns past the last end are zeros."""
    out = np.zeros(qf.shape)
    for slot, columns in (span for group in span_slices(group_ends) for span in group):
        out[:, columns] = E4M3_VALUES[qf[:, columns]] * e8m0_value(span_sf[slot])[:, None]
    return out


def fold_groups(q: Array, sf: Array, group_ends: Array) -> Pair:
    """q (R, M), sf (R, M/32) -> qf (R, M), span_sf (S, R): every span with the running maximum of the group's
    scales.

    The scale of the group's first span is 2^HEADROOM times larger than it needs, so that later spans seldom raise it. A
    NaN block is ignored when scales are chosen and becomes elements 0x7F. The scales of slots without a span are zeros,
    and here the columns past the last end too.
    """
    rows, m = q.shape
    qf, span_sf = np.zeros_like(q), np.zeros((spans(m, len(group_ends)), rows), np.uint8)
    for group in span_slices(group_ends):
        largest = np.zeros(rows, np.int32)  # scale byte + 1; 0 before the first scale
        for i, (slot, columns) in enumerate(group):
            byte = sf[:, columns.start // BLOCK : columns.stop // BLOCK].astype(np.int32)
            m_i = np.where(byte == E8M0_NAN, 0, byte + 1).max(1)
            c_i = np.where(m_i > 0, np.minimum(m_i + HEADROOM, E8M0_NAN), 0) if i == 0 else m_i
            largest = np.maximum(largest, c_i)
            span_sf[slot] = np.maximum(largest - 1, 0)
            shift = byte - span_sf[slot].astype(np.int32)[:, None]
            factor = np.where(byte == E8M0_NAN, np.nan, np.ldexp(1.0, shift))
            qf[:, columns] = to_e4m3(E4M3_VALUES[q[:, columns]] * np.repeat(factor, BLOCK, axis=1))
    return qf, span_sf


def quantize_both_fold(
    x: Array, group_ends: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[Array, Array, Array, Array]:
    """x (M, K) -> qf (M, K), row_sf (M,) of quantize_row_fold; qf_t (K, M), span_sf (S, K): fold_groups of
    quantize_col."""
    columns = fold_groups(*quantize_col(x, rounding, satfinite), group_ends)
    return *quantize_row_fold(x, rounding, satfinite), *columns


def quantize_blockwise_fold(
    x: Array, group_ends: Array, power_of_two: bool = False
) -> tuple[Array, Array, Array, Array]:
    """x (M, K) -> q (M, K), sf (M, ceil(K/128)) of quantize_blockwise; qf_t (K, M), span_sf (S, K): fold_groups of
    quantize_col."""
    return *quantize_blockwise(x, power_of_two), *fold_groups(*quantize_col(x), group_ends)


def quantize_matrix_fold(
    x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> tuple[Array, Array, Array, Array]:
    """x (..., M, K) -> qf (..., M, K), row_sf (..., M); qf_t (..., K, M), col_sf (..., K): both ways one scale per
    row, with the headroom of weights."""
    rows = quantize_row_fold(x, rounding, satfinite, WEIGHT_HEADROOM)
    return *rows, *quantize_matrix_fold_t(x, rounding, satfinite)


def quantize_matrix_fold_t(x: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Pair:
    """x (..., M, K) -> qf_t (..., K, M), col_sf (..., K): one scale per column, with the headroom of weights."""
    return fold_rows(*quantize_col(x, rounding, satfinite), WEIGHT_HEADROOM)


def requantize_col_fold(
    q: Array, sf: Array, group_ends: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False
) -> Pair:
    """q (M, K), sf (M, K/32) -> qf_t (K, M), span_sf (S, K): bf16 values quantized along the tokens, and folded."""
    return fold_groups(*quantize_col(dequantize(q, sf, "bfloat16"), rounding, satfinite), group_ends)


def permute_mx_fold(packed: Array, row_map: Array) -> Pair:
    """packed (R, K + K/32), row_map (P,) -> qf (P, K), row_sf (P,): the rows of the map, folded."""
    return fold_rows(*permute_mx(packed, row_map))


def permute_mx_col_fold(
    packed: Array,
    row_map: Array,
    group_ends: Array,
    rounding: Rounding | str = Rounding.RCEIL,
    satfinite: bool = False,
) -> Pair:
    """packed (R, K + K/32), row_map (P,) -> qf_t (K, P), span_sf (S, K): the rows of the map, along the tokens."""
    return requantize_col_fold(*permute_mx(packed, row_map), group_ends, rounding, satfinite)
