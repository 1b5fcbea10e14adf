"""The ranks agree on their counts before they send rows: an error on one rank is raised on all, and no row is sent.

arguments --check--> counts, number of rows + key of the arguments that all ranks share; or -1
          --all-to-all--> counts of all ranks, or an error on every rank

A receiver reads rows with its own options, so `shared_arguments` are equal on all ranks. Where keys differ the ranks
compare the arguments themselves, and the error names the first that differs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.deduplicate import Deduplicate
from ...core_kernels.policy.recipe import Recipe
from ..ops.checks import check_counts, check_probs, check_shape, require_total
from ..ops.private import group_named
from ..routing.permute import check_replicas
from .all_to_all import TokenReplicas, all_to_all
from .process_groups import agree, can_compare, check_rows_to_send, compare_calls, key_of
from .replicas import Layout, lay_out
from .shards import ALONE, Ranks


class Request(NamedTuple):
    """What a rank passes to an exchange.

    op: of errors before the exchange. rows, counts, probs: as of `dispatch` and `dispatch_probs`. inside: the experts
    weight their rows with probs, else the sum over replicas does. out_dtype: of the result. also: further arguments
    that must be the same on all ranks, by name. error: what this rank is about to raise. An error on one rank raises on
    all: the exchange of counts has its verdict, or, where the number of experts is unknown (0), a small all-gather
    before it.
    """

    op: str
    rows: Tensor | TokenReplicas
    counts: Tensor
    recipe: Recipe
    ranks: Ranks = ALONE
    probs: Tensor | None = None
    inside: bool = True
    out_dtype: torch.dtype | None = None
    also: Mapping[str, Any] = {}
    error: Exception | None = None

    @property
    def x(self) -> Tensor:
        """The rows, or the tokens of TokenReplicas."""
        return self.rows.x if isinstance(self.rows, TokenReplicas) else self.rows

    def after_hooks(self, x: Tensor, probs: Tensor | None) -> "Request":
        """With these tensors in place of its own."""
        rows = self.rows._replace(x=x) if isinstance(self.rows, TokenReplicas) else x
        return self._replace(rows=rows, probs=probs)


class Agreement(NamedTuple):
    """The counts and arguments that a rank knows before it sends rows.

    rows, num_rows: as `checked_rows` returns them. shared: of `shared_arguments`. sent: (E + 1,), this rank's counts,
    and the number of its rows plus `key_of` the shared arguments, modulo 2^31, or -1 if it is about to raise `error`;
    where a token goes once to each rank, also its copies for each one. of_all: `sent` of every rank. received: (E,),
    rows that this rank receives, per rank and local expert. copies: (ranks, 1), copies that it receives, or (ranks, 0).
    layout: of the copies that it sends.
    """

    rows: Tensor | TokenReplicas
    num_rows: int
    shared: Mapping[str, Any]
    sent: Tensor
    of_all: Tensor
    received: Tensor
    copies: Tensor
    error: Exception | None
    layout: Layout | None

    @property
    def totals(self) -> Tensor:
        """(E,) rows of all ranks per expert."""
        return self.of_all[:, : self.received.shape[0]].sum(0, dtype=self.of_all.dtype)


def agree_on_counts(request: Request, deduplicate: Deduplicate = None) -> Agreement:
    """Check this rank's arguments, unless it has an error already, and exchange the counts. A collective; the host
    does not wait, unless the number of experts is unknown, which the ranks compare first. deduplicate: how often a
    token is sent to a rank."""
    rows, counts, ranks, error = request.rows, request.counts, request.ranks, request.error
    num_rows, shared = 0, {}
    try:
        if error is None:
            rows, num_rows = checked_rows(request, deduplicate)
            shared = shared_arguments(request, deduplicate)
    except (TypeError, ValueError) as found:
        error = found
    if not ranks.num_experts:
        if can_compare(ranks.group_name):
            experts = {} if error else {"experts": counts.shape[0]}
            compare_calls("dispatch", experts | shared, ranks.group_name, error)
        elif error is not None:
            raise error
    copies, layout = 0 if deduplicate is None else ranks.degree, None
    if error is not None:
        sent = _error_sentinel(ranks, copies)
    else:
        sent = _message(counts, num_rows, shared)
        if copies and isinstance(rows, TokenReplicas):
            layout = lay_out(rows, counts, ranks.degree)
            sent = torch.cat([sent, layout.counts])
    of_all, received, copies_received = _exchange_counts(sent, ranks, copies)
    return Agreement(rows, num_rows, shared, sent, of_all, received, copies_received, error, layout)


def shared_arguments(request: Request, deduplicate: Deduplicate = None) -> dict[str, Any]:
    """The arguments with which a rank reads the rows that it receives, forward and backward; equal on all ranks."""
    rows, x, once = request.rows, request.x, deduplicate is not None
    # In a compiled graph the other arguments are the layer's, whose ranks have compared them before.
    if torch.compiler.is_compiling():
        return {"top_k": rows.top_k} if once and isinstance(rows, TokenReplicas) else {}
    needed = [name for name, t in (("rows", x), ("probs", request.probs)) if _needs_gradient(t)]
    return {
        "transport": None,  # first: where one rank alone has one, other arguments differ too
        "rows": f"{x.shape[1]} values of {x.dtype}",
        "recipe": request.recipe,
        "deduplicate": deduplicate,
        # A replica's slot is `copy * top_k + k`, so ranks share top_k. Without copies top_k may differ between ranks.
        "top_k": rows.top_k if once and isinstance(rows, TokenReplicas) else None,
        **request.also,
        "probs": "none" if request.probs is None else "given",
        "gradients": ", ".join(needed) or request.also.get("gradients", "none"),
    }


def _needs_gradient(x: Tensor | None) -> bool:
    return x is not None and torch.is_grad_enabled() and x.requires_grad


def _message(counts: Tensor, num_rows: int, shared: Mapping[str, Any]) -> Tensor:
    """(E + 1,) int32."""
    # One number, since each takes the host and the GPU a launch.
    value = (num_rows + _key(shared)) % 2**31
    if torch.compiler.is_compiling():  # a graph reads no counts: it gets splits that every rank refuses
        fits = (counts.sum() == num_rows) & (counts.amin() >= 0)
        counts = torch.where(fits, counts, -1)
    elif counts.dtype == torch.int64:
        counts = counts.clamp(-1, 2**31 - 1)
    return torch.nn.functional.pad(counts.to(torch.int32), (0, 1), value=value)


def _key(shared: Mapping[str, Any]) -> int:
    return shared.get("top_k", 0) if torch.compiler.is_compiling() else key_of(shared)


def send_error_sentinel(ranks: Ranks, deduplicate: Deduplicate = None) -> None:
    """Take part in the exchange of counts of a `dispatch` that this rank will not run, so that all ranks raise."""
    if ranks.degree > 1:
        copies = 0 if deduplicate is None else ranks.degree
        _exchange_counts(_error_sentinel(ranks, copies), ranks, copies)


def _error_sentinel(ranks: Ranks, copies: int) -> Tensor:
    """Counts of -1: this rank is about to raise."""
    return torch.full((ranks.num_experts + 1 + copies,), -1, dtype=torch.int32, device=ranks.device_type)


def _exchange_counts(message: Tensor, ranks: Ranks, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """`of_all`, `received` and `copies` of an `Agreement`. copies: how many numbers of copies are sent."""
    experts = message.shape[0] - 1 - copies
    return _exchange_messages(message, ranks.group_name, ranks.degree, experts // ranks.degree)


@torch.compiler.allow_in_graph  # Dynamo cannot look up a group
def _exchange_messages(message: Tensor, group_name: str, degree: int, local: int) -> tuple[Tensor, Tensor, Tensor]:
    """E * ranks integers take no longer than E, and they give the balance of the whole batch."""
    splits = [message.shape[0]] * degree
    of_all = all_to_all(message.repeat(degree), splits, splits, group_name, "dispatch", "counts").view(degree, -1)
    rank = group_named(group_name).rank()
    copies = of_all[:, degree * local + 1 :][:, rank : rank + 1]
    return of_all, of_all[:, rank * local : (rank + 1) * local].reshape(-1), copies


def checked_rows(request: Request, deduplicate: Deduplicate = None) -> tuple[Tensor | TokenReplicas, int]:
    """The rows with int32 maps and their number; raises if an argument of this rank is wrong."""
    op, x, (_, rows, counts, recipe, ranks, probs, *_) = "dispatch", request.x, request
    check_rows_to_send(op, "rows", x, recipe.mx or bool(recipe.mxfp8_all_to_all))
    if deduplicate is not None and not isinstance(rows, TokenReplicas):
        allowed = "allowed: None for rows; TokenReplicas, whose rows are copies, take the others"
        fail(ValueError, op, "deduplicate", repr(deduplicate), allowed)
    if ranks.num_experts and x.device.type != ranks.device_type:
        allowed = f"allowed: {ranks.device_type}, the device of the experts' group"
        fail(ValueError, op, "rows", f"device {x.device}", allowed)
    num_rows, shape = x.shape[0], tuple(x.shape[:1])
    if isinstance(rows, TokenReplicas):
        order, inverse = check_replicas(op, x, rows.order, rows.inverse, rows.top_k)
        rows = TokenReplicas(x, order, inverse, rows.top_k)
        num_rows, shape = order.shape[0], (x.shape[0], rows.top_k)
    check_counts(op, "counts", counts, x.device)
    check_shape(op, "counts", counts, (ranks.num_experts,) if ranks.num_experts else ("E",))
    if counts.shape[0] == 0 or counts.shape[0] % ranks.degree:
        allowed = f"allowed: (E,) with E a multiple of {ranks.degree}, the ranks of the group"
        fail(ValueError, op, "counts", f"shape {tuple(counts.shape)}", allowed)
    if probs is not None:
        check_probs(op, "probs", probs, shape, x.device)
    return rows, num_rows


def checked_table(counts: Tensor, agreed: Agreement, of_all: list[list[int]], group_name: str) -> list[list[int]]:
    """The values of `Agreement.of_all` as (ranks, E) counts. Raises this rank's error; on every rank ValueError if the
    counts of a rank are wrong or the ranks differ in `Agreement.shared`."""
    if agreed.error is not None:
        raise agreed.error
    experts, key = counts.shape[0], key_of(agreed.shared)
    table = [message[:experts] for message in of_all]
    for rank, row in enumerate(table):
        if min(row) < 0:
            require_total("dispatch", "counts", counts, agreed.num_rows)
            allowed = f"allowed: counts of at least 0 from every rank; rank {rank} raises the error that explains it"
            fail(ValueError, "dispatch", "counts", f"-1 from rank {rank}", allowed)
    if any((message[experts] - sum(row) - key) % 2**31 for message, row in zip(of_all, table, strict=True)):
        error = None
        try:
            require_total("dispatch", "counts", counts, agreed.num_rows)
        except ValueError as found:
            error = found
        agree("dispatch", group_name, agreed.shared, error, "counts")
    return table


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
        splits = splits_of(checked_table(counts, agreed, of_all, group_name), rank)
        copies = [message[experts + 1 :] for message in of_all]
        return splits, ([], []) if agreed.layout is None else ([row[rank] for row in copies], copies[rank])
    if agreed.error is not None:
        raise agreed.error
    differs = agreed.of_all[:, experts] - agreed.of_all[:, :experts].sum(1) - _key(agreed.shared)
    refused = (differs % 2**31 != 0).any()
    both = torch.stack([torch.where(refused, -1, agreed.received), agreed.sent[:experts]]).view(2, degree, -1).sum(-1)
    if agreed.layout is None:
        received, sent = both.tolist()
        return (received, sent), ([], [])
    both = torch.cat([both, agreed.copies.mT, agreed.sent[None, experts + 1 :]])
    received, sent, *copies = both.tolist()
    return (received, sent), (copies[0], copies[1])
