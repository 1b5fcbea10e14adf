"""The exchange of a layer: tokens to the ranks of their experts, and their outputs home.

    groups, prob, handle = exchange.dispatch(request)
    out = experts(groups, handle.layout, prob)          the layout decides how they run: `layout.run(experts, ...)`
    y = exchange.combine(out, handle, request)          handle.counts: rows of all ranks per expert

Local       this process alone                     groups are gathered, and sums read them directly
AllToAll    all-to-alls, before and after          deduplicate: how often a token is sent
Overlapped  memory of peers                        expert_parallel.py; dispatch moves nothing, `run` exchanges
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from ...core_kernels.policy.deduplicate import Deduplicate
from .all_to_all import TokenReplicas
from .combine import combine, groups_to_tokens
from .counts import Request, send_error_sentinel
from .dispatch import dispatch_over, dispatch_probs, tokens_to_groups
from .route import Route
from .shards import Ranks


class Layout(Protocol):
    """How experts run on the rows that `dispatch` gave. padded_counts: of the groups, for experts with a forward of
    their own."""

    @property
    def padded_counts(self) -> Tensor: ...
    def run(self, experts: Any, groups: Tensor, prob: Tensor | None) -> Tensor: ...


class Handle(Protocol):
    """What `combine` needs of its `dispatch`. counts (E,): rows of all ranks per expert, once the experts have run."""

    @property
    def layout(self) -> Layout: ...
    @property
    def counts(self) -> Tensor: ...


class Exchange(Protocol):
    """group: the process group that sends the rows; None is the group of the layer's ranks, by its name."""

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    def dispatch(self, request: Request) -> tuple[Tensor, Tensor | None, Any]:
        """Rows for the experts, with their weights if the experts weight them, and a `Handle`."""
        ...

    def combine(self, out: Tensor, handle: Any, request: Request) -> Tensor:
        """The outputs of the experts as rows (M, N) or, of TokenReplicas, as sums (T, N)."""
        ...

    def send_error_sentinel(self, ranks: Ranks) -> None:
        """Tell the other ranks of an error of this one, which comes before its `dispatch`."""
        ...


@dataclass(frozen=True)
class Local:
    """This process alone, for a layer: requests are of TokenReplicas with all maps of `sort_by_expert`, unchecked."""

    group: None = None

    def dispatch(self, request: Request) -> tuple[Tensor, Tensor | None, Route]:
        tokens, probs = request.rows, request.probs if request.inside else None
        assert isinstance(tokens, TokenReplicas)
        return tokens_to_groups(tokens, request.counts, request.recipe, "", probs)

    def combine(self, out: Tensor, handle: Route, request: Request) -> Tensor:
        assert request.out_dtype is not None
        return groups_to_tokens(out, handle, None if request.inside else request.probs, request.out_dtype)

    def send_error_sentinel(self, ranks: Ranks) -> None:
        """There is nobody to tell."""


@dataclass(frozen=True)
class AllToAll:
    """One exchange after the other, by all-to-alls. deduplicate: of `dispatch`."""

    deduplicate: Deduplicate = None
    group: None = None

    def dispatch(self, request: Request) -> tuple[Tensor, Tensor | None, Route]:
        probs = request.probs if request.inside else None
        if request.ranks.degree > 1:
            also = {**request.also, "transport": None, "weights inside": probs is not None}
            request = request._replace(also=also)
        groups, _, route = dispatch_over(request._replace(probs=probs), self.deduplicate)
        return groups, None if probs is None else dispatch_probs(probs, route), route

    def combine(self, out: Tensor, handle: Route, request: Request) -> Tensor:
        return combine(out, handle, None if request.inside else request.probs, out_dtype=request.out_dtype)

    def send_error_sentinel(self, ranks: Ranks) -> None:
        send_error_sentinel(ranks, self.deduplicate)
