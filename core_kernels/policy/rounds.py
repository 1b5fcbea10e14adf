"""Rounds of a call whose rows do not fit in the capacity of a rank: each has as many of the rows that are left as fit.

    counts (ranks, E) --> rows left at the beginning of each round, the same on all ranks

A round is a call with the rows that are left. Each rank gets rows of its experts in order, whole experts while they
fit. An expert is split only if the next round, which begins with it, could not have all its rows either. An expert
without rows has `alignment` rows of padding, as in every call, so that a round has fewer rows than the capacity.

`lay_out` of core_kernels/peer takes the same decision on the device.
"""

from typing import NamedTuple

import numpy as np

from ..oracle_math import Array

CAPACITY_FACTOR = 1.25
"""The capacity of a rank with rounds, relative to its mean rows, unless the caller states another."""


class Round(NamedTuple):
    """One round.

    Attributes:
        counts: (ranks, E) rows that are left at its beginning, of the ranks of the tokens.
        begun: (ranks,) experts of each rank that this round or an earlier one has rows or padding of; they are in
            order.
    """

    counts: Array
    begun: Array


def capacity_of(rows: int, local_experts: int, alignment: int) -> int:
    """Return the rows of the padded groups of any split of `rows` rows.

    Args:
        rows: of all experts of a rank.
        local_experts: experts of a rank.
        alignment: the rows of a block, of which each expert has whole ones.

    Returns:
        A multiple of `alignment`.

    Example:
        >>> capacity_of(100, 2, 32)
        192
    """
    return -(-(rows + local_experts * alignment) // alignment) * alignment


def list_rounds(counts: Array, capacity: int, alignment: int) -> list[Round]:
    """List the rounds of a call, at least one.

    Args:
        counts: (ranks, E) rows of each rank for each expert. A count below 0 is of no row.
        capacity: the rows of a rank in a round, with padding: room for one block of each expert, and for a row.
        alignment: the rows of a block, of which each expert has whole ones.

    Returns:
        The rounds, which are the same on all ranks.

    Example:
        >>> [r.counts.tolist() for r in list_rounds(np.array([[40, 8], [24, 8]]), capacity=96, alignment=32)]
        [[[40, 8], [24, 8]]]
        >>> [r.counts.tolist() for r in list_rounds(np.array([[90, 8], [24, 8]]), capacity=96, alignment=32)]
        [[[90, 8], [24, 8]], [[0, 0], [18, 0]]]
    """
    ranks, rounds, left = len(counts), [], np.maximum(counts, 0).astype(np.int64)
    while not rounds or left.any():
        of_owners = left.reshape(ranks, ranks, -1)  # of the ranks of tokens, of experts, and their experts
        totals = of_owners.sum(0)
        sizes = np.maximum(-(-totals // alignment), 1) * alignment
        ends = sizes.cumsum(1)
        starts, first = ends - sizes, (ends > capacity).argmax(1)  # the first expert that does not fit, or 0
        of_first = np.arange(ranks), first
        whole = first * alignment + sizes[of_first] <= capacity
        limits = np.where((ends[:, -1] > capacity) & whole, starts[of_first], capacity)[:, None]
        rounds.append(Round(left.reshape(ranks, -1), (starts < limits).sum(1)))
        before = of_owners.cumsum(0) - of_owners
        taken = np.clip(np.clip(limits - starts, 0, totals) - before, 0, of_owners)
        left = (of_owners - taken).reshape(ranks, -1)
    return rounds
