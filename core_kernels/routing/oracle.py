"""The definition of the expert sort and of the maps of rows and slots in numpy. Indices are exact."""

import numpy as np

from ..formats import BLOCK
from ..oracle_math import Array


def sort_by_expert(expert_ids: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """expert_ids (T,) -> order (T,), inverse (T,), counts (E,), all int32.

    >>> sort_by_expert(np.int32([1, 0, 1]), 2)
    (array([1, 0, 2], dtype=int32), array([1, 0, 2], dtype=int32), array([1, 2], dtype=int32))
    """
    slots = range(len(expert_ids))
    order = np.array(sorted(slots, key=lambda slot: expert_ids[slot]), np.int32)  # sorted() is stable
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    counts = np.array([np.sum(expert_ids == e) for e in range(num_experts)], np.int32)
    return order, inverse, counts


def row_map(
    counts: Array, num_rows: int, num_local_experts: int, alignment: int = BLOCK, rank_rows: int = 0
) -> tuple[Array, Array, Array, Array]:
    """counts (ranks * local experts,) -> row_map (P,), inverse (num_rows,), padded_counts (G,), group_ends (G,).

    P = num_rows + G * alignment, rounded up to `alignment`: room for any split of the rows.
    """
    counts = counts.reshape(-1, num_local_experts)
    rows_of: list[list[int]] = [[] for _ in range(num_local_experts)]
    start = 0
    for rank, row in enumerate(counts):
        next_row = rank * rank_rows if rank_rows else start
        for expert, count in enumerate(row):
            rows_of[expert] += range(next_row, next_row + int(count))
            next_row += int(count)
        start = next_row

    padded: list[int] = []
    padded_counts = []
    for rows in rows_of:
        size = max(-(-len(rows) // alignment), 1) * alignment
        padded += rows + [-1] * (size - len(rows))
        padded_counts.append(size)
    total = -(-(num_rows + num_local_experts * alignment) // alignment) * alignment
    padded += [-1] * (total - len(padded))

    inverse = np.full(num_rows, -1, np.int32)
    for position, row in enumerate(padded):
        if row >= 0:
            inverse[row] = position
    return np.array(padded, np.int32), inverse, np.array(padded_counts, np.int32), np.cumsum(padded_counts, dtype="i4")


def slot_map(
    counts: Array, order: Array, weights: Array, top_k: int, alignment: int = BLOCK
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """counts (E,), order (S,), weights (S,) fp32 or (0,) -> slots (P,), tokens (P,), inverse (S,), padded_counts (E,),
    group_ends (E,), all int32, and row_weights (P,) fp32, or (0,) without weights. P as in `row_map`."""
    padded, row_of, padded_counts, group_ends = row_map(counts, len(order), len(counts), alignment)
    slots = np.where(padded < 0, -1, np.append(order, -1)[padded]).astype(np.int32)
    inverse = np.empty_like(order)
    inverse[order] = row_of
    row_weights = np.append(weights, np.float32(0))[slots] if len(weights) == len(order) else weights
    return slots, slots // np.int32(top_k), inverse, padded_counts, group_ends, row_weights
