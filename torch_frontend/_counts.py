"""The ranks agree on their counts before rows travel: an error on one rank is raised on all, and no row is sent.

arguments --check--> counts, number of rows, what needs a gradient; or -1
          --all-to-all--> counts of all ranks, or an error on every rank
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from ._checks import check_counts, check_probs, check_shape, require_total
from ._ranks import can_compare, check_rows_to_send, compare_calls, no_answer
from ._torch_private import group_named
from .ep import TokenReplicas, all_to_all
from .peer_memory import PeerMemory
from .permute import check_replicas
from .replicas import Layout, lay_out
from .shards import Ranks


class Agreement(NamedTuple):
    """What the ranks know before rows travel.

    rows, num_rows: as `checked_rows` returns them. sent: (E + 1,), this rank's counts, and 4 times the number of its
    rows plus `_gradients`, or -1 if it is about to raise `error`; where a token goes once to each rank, also its copies
    for each one. of_all: `sent` of every rank. received: (E,), rows that this rank receives, per rank and local expert.
    copies: (ranks, 1), copies that it receives, or (ranks, 0). layout: of the copies that it sends. gradients:
    `_gradients` of this rank.
    """

    rows: Tensor | TokenReplicas
    num_rows: int
    sent: Tensor
    of_all: Tensor
    received: Tensor
    copies: Tensor
    error: Exception | None
    layout: Layout | None
    gradients: int = 0

    @property
    def totals(self) -> Tensor:
        """(E,) rows of all ranks per expert."""
        return self.of_all[:, : self.received.shape[0]].sum(0, dtype=self.of_all.dtype)


def agree_on_counts(
    rows: Tensor | TokenReplicas, counts: Tensor, recipe: Recipe, ranks: Ranks, probs: Tensor | None,
    error: Exception | None = None, shared: dict[str, Any] | None = None,
) -> Agreement:  # fmt: skip
    """Check this rank's arguments, unless it has an `error` already, and exchange the counts. A collective; the host
    does not wait, unless the number of experts is unknown. Then the ranks compare recipe, `replicas` and what is
    `shared`, by argument; the ranks of a layer have compared theirs before."""
    num_rows = 0
    try:
        if error is None:
            rows, num_rows = checked_rows(rows, counts, recipe, ranks, probs)
    except (TypeError, ValueError) as found:
        error = found
    if not ranks.num_experts:
        if can_compare(ranks.group_name):
            x = rows.x if isinstance(rows, TokenReplicas) else rows
            shared = {"recipe": recipe, "replicas": ranks.replicas} | (shared or {})
            compare_calls("dispatch", x, counts, shared, ranks.group_name, error)
        elif error is not None:
            raise error
    if error is not None:
        return Agreement(rows, num_rows, *_exchange_counts(_refusal(ranks), ranks), error, None)
    gradients, layout = _gradients(rows, probs), None
    sent = _message(counts, num_rows, gradients)
    if ranks.replicas != "each" and isinstance(rows, TokenReplicas):
        layout = lay_out(rows, counts, ranks.degree)
        sent = torch.cat([sent, layout.counts])
    return Agreement(rows, num_rows, *_exchange_counts(sent, ranks), error, layout, gradients)


_NEEDED = ("none", "rows", "probs", "rows and probs")
"""The arguments whose gradients a rank needs, by `_gradients`."""


def _gradients(rows: Tensor | TokenReplicas, probs: Tensor | None) -> int:
    """1 if this rank needs a gradient of the rows, plus 2 for one of the probabilities. Its backward exchanges them."""
    x = rows.x if isinstance(rows, TokenReplicas) else rows
    needs = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return needs * (x.requires_grad + 2 * (probs is not None and probs.requires_grad))


def _message(counts: Tensor, num_rows: int, gradients: int) -> Tensor:
    """(E + 1,) int32."""
    if torch.compiler.is_compiling():  # a graph reads no counts: it gets splits that every rank refuses
        fits = (counts.sum() == num_rows) & (counts.amin() >= 0)
        counts = torch.where(fits, counts, -1)
    elif counts.dtype == torch.int64:
        counts = counts.clamp(-1, 2**31 - 1)
    # One number, since each takes the host and the GPU a launch.
    return torch.nn.functional.pad(counts.to(torch.int32), (0, 1), value=4 * num_rows + gradients)


class Counts(NamedTuple):
    """Valid rows with int32 maps, what the ranks agreed on, and a function that waits for the counts of each rank,
    (ranks, E), and raises if one of them sent none."""

    rows: Tensor | TokenReplicas
    agreed: Agreement
    table: Callable[[], list[list[int]]]


def counts_of_ranks(
    rows: Tensor | TokenReplicas, counts: Tensor, recipe: Recipe, ranks: Ranks, probs: Tensor | None,
    error: Exception | None, shared: dict[str, Any],
) -> Counts:  # fmt: skip
    """`agree_on_counts` for a caller whose host waits later. An error on one rank raises on all: here on this one, in
    `table` on the others."""
    agreed = agree_on_counts(rows, counts, recipe, ranks, probs, error, shared)
    if agreed.error is not None:
        raise agreed.error
    read = _reading(agreed.of_all)

    return Counts(agreed.rows, agreed, lambda: checked_table(counts, agreed, read()))


def _reading(x: Tensor) -> Callable[[], Any]:
    """Begin to copy x to the host; the function returned waits for this copy, not for later work, and returns lists."""
    if not x.is_cuda:
        return x.tolist
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def values() -> Any:
        copied.synchronize()
        return host.tolist()

    return values


def refuse(ranks: Ranks) -> None:
    """Take part in the exchange of counts of a `dispatch` that this rank will not run, so that all ranks raise. Over
    PeerMemory there is none: the others wait for this rank until their time limit."""
    if ranks.degree > 1 and not isinstance(ranks.transport, PeerMemory):
        _exchange_counts(_refusal(ranks), ranks)


def _refusal(ranks: Ranks) -> Tensor:
    """Counts of -1: this rank is about to raise."""
    length = ranks.num_experts + 1 + _numbers_of_copies(ranks)
    return torch.full((length,), -1, dtype=torch.int32, device=ranks.device_type)


def _numbers_of_copies(ranks: Ranks) -> int:
    return 0 if ranks.replicas == "each" else ranks.degree


def _exchange_counts(message: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sent`, `of_all`, `received` and `copies` of an `Agreement`."""
    experts = message.shape[0] - 1 - _numbers_of_copies(ranks)
    return message, *_exchange_messages(message, ranks.group_name, ranks.degree, experts // ranks.degree)


@torch.compiler.allow_in_graph  # Dynamo cannot look up a group
def _exchange_messages(message: Tensor, group_name: str, degree: int, local: int) -> tuple[Tensor, Tensor, Tensor]:
    """E * ranks integers take no longer than E, and they give the balance of the whole batch."""
    splits = [message.shape[0]] * degree
    try:
        of_all = all_to_all(message.repeat(degree), splits, splits, group_name).view(degree, -1)
    except RuntimeError as error:
        no_answer("dispatch", "counts", f"an error while the ranks exchange them: {error}")
    rank = group_named(group_name).rank()
    copies = of_all[:, degree * local + 1 :][:, rank : rank + 1]
    return of_all, of_all[:, rank * local : (rank + 1) * local].reshape(-1), copies


def checked_rows(
    rows: Tensor | TokenReplicas, counts: Tensor, recipe: Recipe, ranks: Ranks | None, probs: Tensor | None
) -> tuple[Tensor | TokenReplicas, int]:
    """The rows with int32 maps and their number; raises if an argument of this rank is wrong."""
    op = "dispatch"
    x = rows.x if isinstance(rows, TokenReplicas) else rows
    check_rows_to_send(op, "rows", x, recipe.mx or bool(recipe.mx_legs))
    if ranks is not None and ranks.replicas != "each" and not isinstance(rows, TokenReplicas):
        allowed = "allowed: 'each' for rows; TokenReplicas, whose rows are copies, take the others"
        fail(ValueError, op, "replicas", repr(ranks.replicas), allowed)
    if ranks is not None and ranks.num_experts and x.device.type != ranks.device_type:
        allowed = f"allowed: {ranks.device_type}, the device of the experts' group"
        fail(ValueError, op, "rows", f"device {x.device}", allowed)
    num_rows, shape = x.shape[0], tuple(x.shape[:1])
    if isinstance(rows, TokenReplicas):
        order, inverse = check_replicas(op, x, rows.order, rows.inverse, rows.top_k)
        rows = TokenReplicas(x, order, inverse, rows.top_k)
        num_rows, shape = order.shape[0], (x.shape[0], rows.top_k)
    check_counts(op, "counts", counts, x.device)
    check_shape(op, "counts", counts, (ranks.num_experts,) if ranks is not None and ranks.num_experts else ("E",))
    degree = 1 if ranks is None else ranks.degree
    if counts.shape[0] == 0 or counts.shape[0] % degree:
        allowed = f"allowed: (E,) with E a multiple of {degree}, the ranks of the group"
        fail(ValueError, op, "counts", f"shape {tuple(counts.shape)}", allowed)
    if probs is not None:
        check_probs(op, "probs", probs, shape, x.device)
    return rows, num_rows


def checked_table(counts: Tensor, agreed: Agreement, of_all: list[list[int]]) -> list[list[int]]:
    """The values of `Agreement.of_all` as (ranks, E) counts; raises this rank's error, or ValueError if its counts are
    wrong, or another rank's, or if ranks need other gradients."""
    if agreed.error is not None:
        raise agreed.error
    experts = counts.shape[0]
    for rank, message in enumerate(of_all):
        row, rows = message[:experts], message[experts] // 4
        if rows < 0 or min(row) < 0 or sum(row) != rows:
            require_total("dispatch", "counts", counts, agreed.num_rows)
            allowed = f"allowed: counts of at least 0 from every rank; rank {rank} raises the error that explains it"
            fail(ValueError, "dispatch", "counts", f"-1 from rank {rank}", allowed)
    for rank, message in enumerate(of_all):
        gradients = message[experts] % 4
        if gradients != agreed.gradients:
            got, here = _NEEDED[gradients], _NEEDED[agreed.gradients]
            allowed = f"allowed: the same on all ranks, here {here}; the backward exchanges them"
            fail(ValueError, "dispatch", "rows", f"gradients of {got} on rank {rank}", allowed)
    return [message[:experts] for message in of_all]


def splits_of(table: list[list[int]], rank: int) -> tuple[list[int], list[int]]:
    """Rows that a rank receives from each rank, and sends to each."""
    local = len(table[0]) // len(table)
    parts = [slice(r * local, (r + 1) * local) for r in range(len(table))]
    return [sum(row[parts[rank]]) for row in table], [sum(table[rank][part]) for part in parts]


BothWays = tuple[list[int], list[int]]


def agreed_splits(counts: Tensor, agreed: Agreement, group_name: str) -> tuple[BothWays, BothWays]:
    """The splits, received and sent, of rows, and of the copies of tokens, which are empty without a layout; the host
    waits. Raises this rank's error, or ValueError if its counts are wrong, or another rank's."""
    degree, experts = agreed.of_all.shape[0], agreed.received.shape[0]
    if not torch.compiler.is_compiling():
        of_all, rank = agreed.of_all.tolist(), group_named(group_name).rank()
        splits = splits_of(checked_table(counts, agreed, of_all), rank)
        copies = [message[experts + 1 :] for message in of_all]
        return splits, ([], []) if agreed.layout is None else ([row[rank] for row in copies], copies[rank])
    if agreed.error is not None:
        raise agreed.error
    both = torch.stack([agreed.received, agreed.sent[:experts]]).view(2, degree, -1).sum(-1)
    if agreed.layout is None:
        received, sent = both.tolist()
        return (received, sent), ([], [])
    both = torch.cat([both, agreed.copies.mT, agreed.sent[None, experts + 1 :]])
    received, sent, *copies = both.tolist()
    return (received, sent), (copies[0], copies[1])
