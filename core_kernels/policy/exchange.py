"""The layout of rows on every rank before and after an expert-parallel all-to-all: pure functions of the counts.

    table[s][e]    rows of rank s for expert e; rank r has the experts [r L, (r + 1) L)

    tokens of rank s    | r0: e0 e1 | r1: e0 e1 | ...     sorted by expert, without padding
    operand of rank r   | e0: s0 s1 .. pad | e1: s0 s1 .. pad |     one group per local expert, padded to `alignment`

Every rank computes the same layouts from the same table. A sender knows the final row of each of its rows in the
receiver's operand. Received rows need no permutation, and their order is fixed.

Local experts are exchanged and multiplied in chunks. The rows of one expert from one rank to another are a `Move`; a
`Step` has the moves of one chunk.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

MOST_CHUNKS = 8
"""Eight products of one expert each take as long as one of eight experts on an H200, and each chunk costs the host some
tens of microseconds."""


class Move(NamedTuple):
    """`rows` rows between this rank and a peer.

    Attributes:
        peer: the other rank.
        source: the first row in the sender's tensor.
        destination: the first row in the receiver's tensor.
        rows: rows that are sent.
    """

    peer: int
    source: int
    destination: int
    rows: int


class Step(NamedTuple):
    """The moves of one chunk of local experts, one per peer and expert, empty ones too.

    The first peer is the rank itself. Then a rank sends to rank + 1, rank + 2, ... (in combine to rank - 1, rank - 2,
    ...), so that in each turn every rank receives from one peer.

    Attributes:
        sends: the moves from this rank.
        receives: the moves to this rank.
    """

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]


class Chunk(NamedTuple):
    """Local experts and the rows of their groups.

    Attributes:
        first: the first expert.
        last: the end of the experts.
        start: the first row of their groups in the operand.
        end: the end of these rows.
    """

    first: int
    last: int
    start: int
    end: int


class Exchange(NamedTuple):
    """The layouts of one exchange, for one rank.

    Attributes:
        chunks: of local experts.
        group_ends: the end of each group in the operand, padding included.
        padding: the rows [start, end) of the operand that no rank fills.
        operand_rows: rows of each rank's operand.
        token_rows: rows of each rank's tokens.
        to_experts: a step per chunk from tokens to operands.
        to_tokens: the reverse steps.
    """

    chunks: tuple[Chunk, ...]
    group_ends: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    operand_rows: tuple[int, ...]
    token_rows: tuple[int, ...]
    to_experts: tuple[Step, ...]
    to_tokens: tuple[Step, ...]


def expert_chunks(experts: int, most: int = MOST_CHUNKS) -> tuple[tuple[int, int], ...]:
    """Ranges of local experts that are exchanged and multiplied together: at most `most`.

    Of three and more the first and the last have one expert: dispatch of the first chunk and combine of the last one
    cannot be overlapped.

    Args:
        experts: local experts.
        most: the largest number of chunks.

    Returns:
        (first, end) of each chunk.

    Example:
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
    """The exchange of a rank.

    Args:
        table: (ranks, E) rows of each rank for each expert, E a multiple of the ranks.
        rank: this rank.
        alignment: rows that each group is padded to.
        chunk_rows: a chunk of the busiest rank has about so many rows or more; there are at most `MOST_CHUNKS`.

    Returns:
        The layouts of the exchange.

    Example:
        >>> plan = plan_exchange([[1, 2], [3, 0]], rank=0, alignment=32)
        >>> plan.to_experts[0].sends
        (Move(peer=0, source=0, destination=0, rows=1), Move(peer=1, source=1, destination=0, rows=2))
        >>> plan.to_experts[0].receives[1], plan.padding
        (Move(peer=1, source=0, destination=1, rows=3), ((4, 32),))
    """
    rows = np.asarray(table)
    ranks, experts = rows.shape
    local = experts // ranks
    source = _before(rows, axis=1)
    filled = rows.sum(axis=0)
    groups = np.maximum(-(-filled // alignment), 1) * alignment  # an empty group is one of padding, as in `row_map`
    ends = groups.reshape(ranks, local).cumsum(axis=1)
    starts = ends.reshape(-1) - groups
    destination = starts + _before(rows, axis=0)
    moves = np.stack([source, destination, rows], axis=2)
    back = moves[:, :, [1, 0, 2]]

    operand_rows = tuple(ends[:, -1].tolist())
    ranges = expert_chunks(local, min(max(max(operand_rows) // chunk_rows, 1), MOST_CHUNKS))
    group_ends = tuple(ends[rank].tolist())
    chunks = tuple(Chunk(a, b, group_ends[a - 1] if a else 0, group_ends[b - 1]) for a, b in ranges)
    mine = slice(rank * local, (rank + 1) * local)
    after, before = ((rank + way * np.arange(ranks)) % ranks for way in (1, -1))

    def sent(moves: np.ndarray) -> list[tuple[Move, ...]]:
        return _moves(after, moves[rank].reshape(ranks, local, 3)[after], ranges)

    def received(moves: np.ndarray) -> list[tuple[Move, ...]]:
        return _moves(before, moves[before, mine], ranges)

    return Exchange(
        chunks,
        group_ends,
        tuple((a, b) for a, b in zip((starts + filled)[mine].tolist(), group_ends, strict=True) if a < b),
        operand_rows,
        tuple(rows.sum(axis=1).tolist()),
        tuple(map(Step, sent(moves), received(moves))),
        tuple(map(Step, received(back), sent(back))),
    )


def _before(sizes: np.ndarray, axis: int) -> np.ndarray:
    """The sum of the sizes before each one."""
    return sizes.cumsum(axis) - sizes


def _moves(peers: np.ndarray, moves: np.ndarray, ranges: Sequence[tuple[int, int]]) -> list[tuple[Move, ...]]:
    """Of each range of local experts, peer by peer. moves: (peers, local, 3) source, destination and rows."""
    named = np.concatenate([np.broadcast_to(peers[:, None, None], (*moves.shape[:2], 1)), moves], axis=2)
    return [tuple(map(Move._make, named[:, first:last].reshape(-1, 4).tolist())) for first, last in ranges]
