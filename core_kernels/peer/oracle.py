"""The definition of the layout of an exchange through memory of peers, in numpy. Bytes are exact.

A position is rank << 32 | row of the operand of that rank's experts, or -1.
"""

import numpy as np

from ..formats import BLOCK
from ..oracle_math import Array


def lay_out(
    counts: Array, rank: int, rows: int, capacity: int, alignment: int = BLOCK, whole: bool = False
) -> tuple[Array, Array, Array, Array]:
    """counts (ranks, E) -> positions (rows,) of the rows of `rank`, group_ends (E / ranks,) of its groups, totals (E,),
    and needed (ranks,), the rows of the groups of each rank. Rows beyond the counts have no position. whole: a group
    that does not fit, but fits after one block of `alignment` rows per group before it, has no positions, and no later
    group of its rank has.

    >>> lay_out(np.int32([[1, 2], [3, 0]]), rank=1, rows=3, capacity=32)[0]
    array([1, 2, 3])
    """
    ranks, experts = counts.shape
    local = experts // ranks
    positions, ends, needed = [], np.zeros(experts, np.int32), np.zeros(ranks, int)
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
        ends[e] = min(needed[owner], limit)
    mine = slice(rank * local, (rank + 1) * local)
    positions += [-1] * (rows - len(positions))
    return np.array(positions[:rows], np.int64), ends[mine], counts.sum(0, dtype=np.int32), needed
