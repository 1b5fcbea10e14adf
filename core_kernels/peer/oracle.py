"""The definition of the exchange through memory of peers, in numpy. Bytes are exact.

Memory of rank r: `values[r]` (capacity, K). A position is rank << 32 | row, or -1.
"""

import numpy as np

from ..combine.oracle import combine
from ..formats import BLOCK
from ..oracle_math import Array


def lay_out(
    counts: Array, rank: int, rows: int, capacity: int, alignment: int = BLOCK, whole: bool = False
) -> tuple[Array, Array, Array, Array, Array]:
    """counts (ranks, E) -> positions (rows,) of the rows of `rank`, group_ends and filled_ends (E / ranks,) of its
    groups, totals (E,), and needed (ranks,), the rows of the groups of each rank. whole: a group that does not fit, but
    fits after one block of `alignment` rows per group before it, has no positions, and no later group of its rank has.

    >>> lay_out(np.int32([[1, 2], [3, 0]]), rank=1, rows=3, capacity=32)[0]
    array([1, 2, 3])
    """
    ranks, experts = counts.shape
    local = experts // ranks
    positions, ends, filled, needed = [], np.zeros(experts, np.int32), np.zeros(experts, np.int32), np.zeros(ranks, int)
    limits = [capacity] * ranks
    for e in range(experts):
        owner, row = e // local, needed[e // local]
        before, total = int(counts[:rank, e].sum()), int(counts[:, e].sum())
        size = max(-(-total // alignment), 1) * alignment
        needed[owner] = row + size
        first = row <= capacity < needed[owner]
        if whole and first and e % local * alignment + size <= capacity:
            limits[owner] = row
        limit = limits[owner]
        rows_there = range(row + before, row + before + int(counts[rank, e]))
        positions += [owner << 32 | r if r < limit else -1 for r in rows_there]
        ends[e], filled[e] = min(needed[owner], limit), min(row + total, limit)
    mine = slice(rank * local, (rank + 1) * local)
    return np.array(positions[:rows], np.int64), ends[mine], filled[mine], counts.sum(0, dtype=np.int32), needed


def push(memory: list[Array], x: Array, slots: Array, positions: Array) -> None:
    """Write row t of x to the position of each of its slots (T, K), rows of `positions`."""
    for t, row in np.argwhere(slots >= 0):
        position = positions[slots[t, row]]
        if position >= 0:
            memory[position >> 32][position & (2**32 - 1)] = x[t]


def pull(memory: list[Array], slots: Array, positions: Array, out_dtype: str, drop: bool = False) -> Array:
    """The sum of the rows at the positions of each token's slots, as `combine` of the unweighted rows. A row without a
    position makes it NaN, or is zero (drop)."""
    width = memory[0].shape[1]
    rows = np.zeros((len(positions), width), memory[0].dtype)
    for i, position in enumerate(positions):
        if position >= 0:
            rows[i] = memory[position >> 32][position & (2**32 - 1)]
    y = combine(rows, slots, np.zeros(0, np.float32), out_dtype)
    if not drop:
        y[(positions[slots] < 0).any(1)] = np.nan
    return y
