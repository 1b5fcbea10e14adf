"""The definition of the balanced fold in numpy: exact bytes."""

import numpy as np

from ..formats import BLOCK, E8M0_MAX, E8M0_NAN, spans
from ..oracle_math import E4M3_VALUES, Array, Pair, group_slices, to_e4m3
from .oracle import span_slices

NONE = 255
"""The level of no scale at all."""


def span_levels(sf: Array, group_ends: Array) -> Array:
    """sf (M, B) -> (S, B): octaves below the row's largest scale, the least of a span; NONE without any."""
    byte, plain = sf.astype(np.int32), (sf != 0) & (sf != E8M0_NAN)
    below = np.where(plain, np.where(plain, byte, 0).max(1, initial=0, keepdims=True) - byte, NONE)
    out = np.full((spans(len(sf), len(group_ends)), sf.shape[1]), NONE, np.uint8)
    for slot, rows in (span for group in span_slices(group_ends) for span in group):
        out[slot] = below[rows].min(0)
    return out


def group_levels(levels: Array, group_ends: Array) -> Array:
    """(S, B) -> (G, B): the least of the group's spans; 0 in place of NONE."""
    out = np.full((len(group_ends), levels.shape[1]), NONE, np.uint8)
    for group, of in zip(span_slices(group_ends), out, strict=True):
        for slot, _ in group:
            np.minimum(of, levels[slot], out=of)
    return np.where(out == NONE, 0, out).astype(np.uint8)


def fold_rows_balanced(q: Array, sf: Array, own: Array, other: Array, group_ends: Array) -> Pair:
    """q (M, K), sf (M, B), own and other (G, B) -> qf (M, K), row_sf (M,)."""
    moved = np.zeros(sf.shape, np.int32)
    for g, rows in enumerate(group_slices(group_ends)):
        moved[rows] = np.trunc((own[g].astype(np.int32) - other[g]) / 2)
    nan = sf == E8M0_NAN
    exponent = np.where(sf == 0, 0, np.minimum(sf + moved, E8M0_MAX))
    row = np.where(nan, 0, exponent).max(1, initial=0, keepdims=True)
    factor = np.where(nan, np.nan, np.ldexp(1.0, exponent - row))
    row_sf = np.where(nan.all(1), E8M0_NAN, row[:, 0]).astype(np.uint8)
    return to_e4m3(E4M3_VALUES[q] * np.repeat(factor, BLOCK, axis=1)), row_sf


def levels_of(sf: Array, group_ends: Array) -> Array:
    """sf (M, B) -> (G, B)."""
    return group_levels(span_levels(sf, group_ends), group_ends)


def balanced(rows: Pair, weights: list[Pair], group_ends: Array) -> tuple[Pair, list[Pair]]:
    """(q, sf) of rows (M, K) and of weights (G, N, K) that they are multiplied by -> the same folded."""
    own = levels_of(rows[1], group_ends)
    ends = [np.arange(1, len(group_ends) + 1, dtype=np.int32) * sf.shape[1] for _, sf in weights]
    flat = [(q.reshape(-1, q.shape[-1]), sf.reshape(-1, sf.shape[-1])) for q, sf in weights]
    other = np.minimum.reduce([levels_of(sf, of) for (_, sf), of in zip(flat, ends, strict=True)])
    folded = []
    for (q, sf), of, (shaped, _) in zip(flat, ends, weights, strict=True):
        qf, row_sf = fold_rows_balanced(q, sf, other, own, of)
        folded.append((qf.reshape(shaped.shape), row_sf.reshape(shaped.shape[:-1])))
    return fold_rows_balanced(*rows, own, other, group_ends), folded
