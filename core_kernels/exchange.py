"""Where rows lie on every rank before and after an expert-parallel exchange: pure functions of the table of counts.

    table[s][e]    rows of rank s for expert e; rank r has the experts [r L, (r + 1) L)

    tokens of rank s    | r0: e0 e1 | r1: e0 e1 | ...     sorted by expert, without padding
    operand of rank r   | e0: s0 s1 .. pad | e1: s0 s1 .. pad |     one group per local expert, padded to `alignment`

Every rank computes the same layouts from the same table, so a sender knows the final row of each of its rows in the
receiver's operand: what arrives needs no permutation, and the order of rows is fixed.

Local experts are exchanged and multiplied in chunks. The rows of one expert from one rank to another are a `Move`; a
`Step` has the moves of one chunk.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

MOST_CHUNKS = 8
"""Eight products of one expert each take as long as one of eight experts on an H200, and each chunk costs the host some
tens of microseconds."""


class Move(NamedTuple):
    """`rows` rows between this rank and a peer. source: the first row in the sender's tensor; destination: in the
    receiver's."""

    peer: int
    source: int
    destination: int
    rows: int


class Step(NamedTuple):
    """The moves of one chunk of local experts, one per peer and expert, empty ones too. The first peer is the rank
    itself. Then a rank sends to rank + 1, rank + 2, ... (on the way back to rank - 1, rank - 2, ...), so that in each
    turn every rank receives from one peer."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


class Chunk(NamedTuple):
    """Local experts [first, last) and the rows [start, end) of their groups in the operand."""

    first: int
    last: int
    start: int
    end: int


class Exchange(NamedTuple):
    """The layouts of one exchange, for one rank.

    chunks: of local experts. group_ends: the end of each group in the operand, padding included. padding: the rows
    [start, end) of the operand that no rank fills. operand_rows, token_rows: rows of each rank's operand and tokens.
    to_experts: a step per chunk from tokens to operands. to_tokens: the way back.
    """

    chunks: tuple[Chunk, ...]
    group_ends: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    operand_rows: tuple[int, ...]
    token_rows: tuple[int, ...]
    to_experts: tuple[Step, ...]
    to_tokens: tuple[Step, ...]


def expert_chunks(experts: int, most: int = MOST_CHUNKS) -> tuple[tuple[int, int], ...]:
    """Ranges of local experts that are exchanged and multiplied together: at most `most`. Of three and more the first
    and the last have one expert, since nothing hides the exchange of the first chunk and the way back of the last one.

    >>> expert_chunks(4), expert_chunks(10)
    (((0, 1), (1, 2), (2, 3), (3, 4)), ((0, 1), (1, 2), (2, 3), (3, 5), (5, 6), (6, 7), (7, 9), (9, 10)))
    >>> expert_chunks(8, 4), expert_chunks(8, 1)
    (((0, 1), (1, 4), (4, 7), (7, 8)), ((0, 8),))
    """
    if experts <= most:
        return tuple((e, e + 1) for e in range(experts))
    edges = 1 if most > 2 else 0
    inner, chunks = experts - 2 * edges, most - 2 * edges
    ends = [edges + inner * c // chunks for c in range(chunks + 1)]
    return tuple(pairwise([0, *ends, experts] if edges else ends))


def plan_exchange(table: Sequence[Sequence[int]], rank: int, alignment: int, chunk_rows: int = 1) -> Exchange:
    """The exchange of a rank. table: (ranks, E) rows of each rank for each expert, E a multiple of the ranks.
    chunk_rows: a chunk of the busiest rank has about so many rows or more; there are at most `MOST_CHUNKS`.

    >>> plan = plan_exchange([[1, 2], [3, 0]], rank=0, alignment=32)
    >>> plan.to_experts[0].sends
    (Move(peer=0, source=0, destination=0, rows=1), Move(peer=1, source=1, destination=0, rows=2))
    >>> plan.to_experts[0].receives[1], plan.padding
    (Move(peer=1, source=0, destination=1, rows=3), ((4, 32),))
    """
    ranks = len(table)
    local = len(table[0]) // ranks
    operands = [_operand(table, owner, local, alignment) for owner in range(ranks)]
    ends, filled = operands[rank].ends, operands[rank].filled
    tokens = [_starts(row) for row in table]
    most = max(operand.ends[-1] for operand in operands) // chunk_rows
    ranges = expert_chunks(local, min(max(most, 1), MOST_CHUNKS))
    chunks = tuple(Chunk(a, b, ends[a - 1] if a else 0, ends[b - 1]) for a, b in ranges)

    def move(source: int, owner: int, e: int, peer: int) -> Move:
        expert = owner * local + e
        return Move(peer, tokens[source][expert], operands[owner].starts[e][source], table[source][expert])

    def to_experts(chunk: Chunk) -> Step:
        experts = range(chunk.first, chunk.last)
        after, before = ([(rank + way * k) % ranks for k in range(ranks)] for way in (1, -1))
        sends = tuple(move(rank, peer, e, peer) for peer in after for e in experts)
        return Step(sends, tuple(move(peer, rank, e, peer) for peer in before for e in experts))

    steps = tuple(map(to_experts, chunks))
    return Exchange(
        chunks,
        ends,
        tuple((stop, end) for stop, end in zip(filled, ends, strict=True) if stop < end),
        tuple(operand.ends[-1] for operand in operands),
        tuple(sum(row) for row in table),
        steps,
        tuple(map(_reversed, steps)),
    )


def _reversed(step: Step) -> Step:
    """The way back of a step."""
    sends, receives = (tuple(Move(m.peer, m.destination, m.source, m.rows) for m in moves) for moves in step)
    return Step(receives, sends)


class _Operand(NamedTuple):
    ends: tuple[int, ...]  # of groups, with padding
    filled: tuple[int, ...]  # ends of the rows that are tokens
    starts: tuple[tuple[int, ...], ...]  # [local expert][source]


def _operand(table: Sequence[Sequence[int]], owner: int, local: int, alignment: int) -> _Operand:
    """The operand of a rank. An empty group is one aligned group of padding, as in `row_map`."""
    end, ends, filled, starts = 0, [], [], []
    for e in range(owner * local, (owner + 1) * local):
        starts.append(tuple(end + before for before in _starts([row[e] for row in table])))
        rows = sum(row[e] for row in table)
        filled.append(end + rows)
        end += max(-(-rows // alignment), 1) * alignment
        ends.append(end)
    return _Operand(tuple(ends), tuple(filled), tuple(starts))


def _starts(sizes: Sequence[int]) -> list[int]:
    """The sum of the sizes before each one."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts[:-1]
