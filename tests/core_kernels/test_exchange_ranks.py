"""The exchange of up to 64 ranks, carried out on arrays of identities in one process.

    plan_exchange of every rank --moves--> operands --moves back--> tokens

A row is (rank, token, expert). The expected operands are sorted rows, without the plan's arithmetic.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from mxep.core_kernels.policy.exchange import MOST_CHUNKS, Exchange, Step, plan_exchange

ROWS, ALIGNMENT = 384, 32
NOBODY = -1  # before anything is written, and in padding


def drawn(routing: str, ranks: int, experts: int) -> np.ndarray:
    """(ranks, experts) rows of each rank for each expert."""
    rng, local = np.random.default_rng(5), experts // ranks
    weight, rows, expert = np.ones(experts), np.full(ranks, ROWS), np.arange(experts)
    if routing == "balanced":
        return np.full((ranks, experts), 2)
    if routing == "one expert 30%":
        weight[77] = 0.3 / 0.7 * (experts - 1)
    if routing == "dirichlet":
        weight = rng.dirichlet(np.full(experts, 0.3))
    if routing == "empty experts":
        weight[rng.random(experts) < 0.5] = 0
    if routing == "empty ranks":  # 0, 17 and 63 send nothing, 8 and 62 receive nothing, 3 neither
        rows[[0, 3, 17, 63]] = 0
        weight[np.isin(expert // local, [3, 8, 62])] = 0
    if routing == "all to one expert":
        weight[expert != 200] = 0
    return rng.multinomial(rows, weight / weight.sum())


ROUTINGS = ("balanced", "one expert 30%", "dirichlet", "empty experts", "empty ranks", "all to one expert")
CASES = [
    *((routing, 64, 256, 1) for routing in ROUTINGS),
    ("dirichlet", 5, 60, 1),  # chunks of two experts
    # Chunks of about so many rows: 4 and 2 of them for the busiest rank, which has five times the rows of another.
    *(("one expert 30%", 16, 128, chunk_rows) for chunk_rows in (500, 1000)),
    # 8, 7, 5, 2 and 1 chunks; another rank would make 4, 3, 2 and 1.
    *(("dirichlet", 5, 60, chunk_rows) for chunk_rows in (130, 150, 200, 400, 10**6)),
]


@pytest.mark.parametrize(("routing", "ranks", "experts", "chunk_rows"), CASES)
def test_every_row_reaches_its_expert_once_and_comes_home_once(
    routing: str, ranks: int, experts: int, chunk_rows: int
) -> None:
    table, local = drawn(routing, ranks, experts), experts // ranks
    plans = [plan_exchange(table.tolist(), rank, ALIGNMENT, chunk_rows) for rank in range(ranks)]
    check_chunks(plans, local, chunk_rows)
    tokens = [rows_of(rank, counts) for rank, counts in enumerate(table)]
    by_expert = np.concatenate(tokens)
    by_expert = by_expert[np.argsort(by_expert[:, 2], kind="stable")]  # of an expert: by rank, then by token
    groups = np.split(by_expert, np.cumsum(table.sum(0))[:-1])

    operands = moved(plans, "to_experts", tokens)
    for rank, (plan, operand) in enumerate(zip(plans, operands, strict=True)):
        check_operand(plan, operand, groups[rank * local : (rank + 1) * local])

    home = moved(plans, "to_tokens", operands)
    for mine, back in zip(tokens, home, strict=True):
        np.testing.assert_array_equal(back, mine)


def rows_of(rank: int, counts: np.ndarray) -> np.ndarray:
    """(rows, 3): the rank, the token, the expert of each row of a rank, sorted by expert."""
    expert = np.repeat(np.arange(counts.size), counts)
    return np.stack([np.full_like(expert, rank), np.arange(expert.size), expert], axis=1)


def check_chunks(plans: Sequence[Exchange], local: int, chunk_rows: int) -> None:
    """All ranks have the same chunks, or they would wait for each other. A chunk of the busiest rank has `chunk_rows`
    rows or more on average; with one chunk more it would have fewer, unless there are no more chunks."""
    experts = [[(chunk.first, chunk.last) for chunk in plan.chunks] for plan in plans]
    assert experts == experts[:1] * len(plans)
    busiest, chunks = max(plan.group_ends[-1] for plan in plans), len(experts[0])
    assert chunks == 1 or busiest >= chunks * chunk_rows
    assert chunks == min(local, MOST_CHUNKS) or busiest < (chunks + 1) * chunk_rows


def check_operand(plan: Exchange, operand: np.ndarray, groups: Sequence[np.ndarray]) -> None:
    """Each group is its expert's rows and padding up to its end; the chunks are the groups, once and in order."""
    padding, filled = set(), np.zeros(len(operand), bool)
    for (start, end), group in zip(pairwise((0, *plan.group_ends)), groups, strict=True):
        assert end - start == max(-(-len(group) // ALIGNMENT), 1) * ALIGNMENT
        filled[start : start + len(group)] = True
        np.testing.assert_array_equal(operand[start : start + len(group)], group)
        padding |= {(start + len(group), end)} if start + len(group) < end else set()
    assert len(operand) == plan.group_ends[-1]
    assert set(plan.padding) == padding
    np.testing.assert_array_equal(operand[~filled], NOBODY)
    assert [expert for chunk in plan.chunks for expert in range(chunk.first, chunk.last)] == list(range(len(groups)))
    bounds = (0, *plan.group_ends)
    assert all((c.start, c.end) == (bounds[c.first], bounds[c.last]) for c in plan.chunks)


def moved(plans: Sequence[Exchange], way: str, sources: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The rows of each rank after all its peers have sent; each row is written once at most."""
    homeward = way == "to_tokens"
    rows = plans[0].token_rows if homeward else plans[0].operand_rows
    assert all((plan.token_rows if homeward else plan.operand_rows) == rows for plan in plans)
    arrays = [np.full((n, 3), NOBODY) for n in rows]
    writes = [np.zeros(n, int) for n in rows]
    for c in range(len(plans[0].chunks)):
        steps: list[Step] = [getattr(plan, way)[c] for plan in plans]
        check_agreement(steps)
        check_turns(steps, -1 if homeward else 1)
        for rank, step in enumerate(steps):
            chunk = plans[rank].chunks[c]  # multiplied rows may be sent back
            first, last = (chunk.start, chunk.end) if homeward else (0, len(sources[rank]))
            for peer, source, destination, n in step.sends:
                assert first <= source <= source + n <= last
                assert 0 <= destination <= destination + n <= len(arrays[peer])
                arrays[peer][destination : destination + n] = sources[rank][source : source + n]
                writes[peer][destination : destination + n] += 1
    for array, times in zip(arrays, writes, strict=True):
        np.testing.assert_array_equal(times, array[:, 0] != NOBODY)
    return arrays


def check_agreement(steps: Sequence[Step]) -> None:
    """The rows that a rank sends to a peer, in order, are the rows that the peer expects."""
    sent, expected = {}, {}
    for rank, step in enumerate(steps):
        for move in step.sends:
            sent.setdefault((rank, move.peer), []).append(move[1:])
        for move in step.receives:
            expected.setdefault((move.peer, rank), []).append(move[1:])
    assert sent == expected


def check_turns(steps: Sequence[Step], way: int) -> None:
    """As its k-th move rank r sends to rank r + way * k, so that each rank receives from one peer at a time."""
    ranks, experts = len(steps), len(steps[0].sends) // len(steps)
    for rank, step in enumerate(steps):
        assert [move.peer for move in step.sends] == [
            (rank + way * turn) % ranks for turn in range(ranks) for _ in range(experts)
        ]
