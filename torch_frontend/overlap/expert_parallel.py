"""Products and feed-forwards of experts on several ranks, as one function each.

    expert_parallel_mm     rows (M, K)  --> out (M, N), row i multiplied by the matrix of its expert, wherever it is
    expert_parallel_ffn    rows or TokenReplicas --> the experts' SwiGLU feed-forward

They are `dispatch`, `grouped_mm` or `grouped_swiglu_ffn`, and `combine`. Over memory of peers the bytes are the same:

    PeerMemory.reserve --.--> device_exchange.py    the exchange overlaps with the products
                         '--> peer_experts.py       all other calls: pull, products, push
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.deduplicate import Deduplicate
from ...core_kernels.policy.recipe import RECIPES, Recipe
from ...core_kernels.swiglu.activation import PLAIN, SwiGLU
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request, agree_on_counts
from ..exchange.exchange import AllToAll, Exchange
from ..exchange.process_groups import degree_of, name_of
from ..exchange.shards import Ranks
from ..products.ffn import Bias, Biases, FFNOptions
from ..products.weights import Weights, outlives_forward
from . import device_exchange, peer_experts
from .device_exchange import run as run_on_device
from .local_experts import FFN, MM
from .peer_experts import run as run_over_peers
from .peer_memory import PeerMemory
from .rows import Transfers


def require_no_weighted_sum(op: str, argument: str, prob_in: str) -> None:
    """Raise ValueError for the place of the probabilities whose gradient reads rows of the forward, which memory of
    peers does not keep."""
    if prob_in == "combine":
        allowed = "allowed: 'swiglu' or 'input' with PeerMemory; the gradient of a weighted sum reads the rows again"
        fail(ValueError, op, argument, "prob_in='combine'", allowed)


class Overlapped:
    """An `Exchange` over memory of peers: `dispatch` moves nothing, the experts exchange their rows."""

    def __init__(self, transport: PeerMemory) -> None:
        self.transport, self.group = transport, transport.group

    def dispatch(self, request: Request) -> tuple[Tensor, Tensor | None, "LocalTokens"]:
        return request.x, request.probs, LocalTokens(self.transport, request)

    def combine(self, out: Tensor, handle: "LocalTokens", request: Request) -> Tensor:
        return out

    def send_error_sentinel(self, ranks: Ranks) -> None:
        self.transport.send_error_sentinel(ranks)


def choose_exchange(transport: PeerMemory | None, deduplicate: Deduplicate = None) -> Exchange:
    """The exchange of several ranks. transport: None is one exchange after the other. deduplicate: of `AllToAll`."""
    return AllToAll(deduplicate) if transport is None else Overlapped(transport)


class LocalTokens:
    """The `Handle` and the layout of rows that no rank has sent yet."""

    counts: Tensor

    def __init__(self, transport: PeerMemory, request: Request) -> None:
        self.transport, self.request = transport, request

    @property
    def layout(self) -> "LocalTokens":
        return self

    @property
    def padded_counts(self) -> Tensor:
        allowed = "allowed: the forward of GroupedExperts over a transport; no transport for another"
        fail(TypeError, self.request.op, "experts", "a forward of their own", allowed)

    def run(self, experts: FFN | MM, x: Tensor, prob: Tensor | None) -> Tensor:
        """Dispatch, experts and combine."""
        y, self.counts = _run_eagerly(self.transport, self.request, experts, x, prob)
        return y


def _run(
    transport: PeerMemory, request: Request, experts: FFN | MM, x: Tensor, probs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result, and (E,) rows of all ranks per expert. x, probs: of the request, after hooks of the experts."""
    inside = request.inside and probs is not None
    also = {**request.also, "transport": transport.config_key, "weights inside": inside}
    request = request.after_hooks(x, probs)._replace(also=also)
    try:
        if probs is not None and not inside:
            require_no_weighted_sum(request.op, "prob_in", "combine")
        found = experts.local_experts(request)
    except (TypeError, ValueError) as error:
        transport.raise_error(error, request.ranks)
    overlaps = device_exchange.takes(request, found, transport.device)
    transfers = Transfers.of(request.recipe, request.x.shape[1], request.x.dtype, found.width)
    rows = transport.reserve(request, overlaps, transfers.row_bytes, transfers.slot_bytes)
    if overlaps:
        call = device_exchange.call_of(rows, request, found)
        return run_on_device(call, request, x, probs, found.parameters)
    call = peer_experts.call_of(rows, request, found, transfers)
    return run_over_peers(call, request, x, probs, found.parameters)


# The kernels and the barriers of peers are not ops that Dynamo traces.
_run_eagerly: Callable[..., Any] = torch.compiler.disable(_run)


def expert_parallel_mm(
    rows: Tensor | TokenReplicas,
    w: Weights,
    counts: Tensor,
    *,
    recipe: Recipe | str = "mxfp8",
    bias: Tensor | None = None,
    group: "str | dist.ProcessGroup | None" = None,
    transport: PeerMemory | None = None,
) -> Tensor:
    """Multiply each row by the matrix of its expert, on the expert's rank; differentiable in rows, w and bias.

    The result and all gradients have the same bytes as from `dispatch`, `grouped_mm` and `combine`. The host waits for
    the counts, over `PeerMemory` without rounds for nothing. `PeerMemory` overlaps recipe "mxfp8" on Hopper, without a
    bias; with rounds the gradient of a split expert's matrix is a sum. All ranks need a gradient of the rows, or none
    does.

    Args:
        rows: As in `dispatch`.
        w: (G, N, K), of this rank's experts, as in `grouped_mm`.
        counts: As in `dispatch`.
        recipe: As in `dispatch`.
        bias: Of this rank's experts, as in `grouped_mm`.
        group: As in `dispatch`.
        transport: A `PeerMemory` of the group; None is one exchange after the other, by all-to-alls.

    Returns:
        (M, N) bfloat16, or of TokenReplicas (T, N), the sum over each token's replicas.

    Raises:
        ValueError: For shapes and values that are not allowed. An error on one rank raises on all ranks, and no row is
            sent. With `PeerMemory`, after the first call, the other ranks wait until their timeout.
        TypeError: For other dtypes and types, in the same way.

    Example:
        >>> w = torch.stack([torch.eye(32), 2 * torch.eye(32)])
        >>> expert_parallel_mm(torch.ones(3, 32), w, torch.tensor([1, 2]))[:, 0].tolist()
        [1.0, 2.0, 2.0]
    """
    request = Request("expert_parallel_mm", rows, counts, RECIPES["bf16"], out_dtype=torch.bfloat16)

    def make() -> tuple[Request, MM]:
        of = Recipe.parse(recipe)
        return request._replace(recipe=of), MM(w, bias, of)

    return _over(transport, group, request, make)


def expert_parallel_ffn(
    rows: Tensor | TokenReplicas,
    counts: Tensor,
    w1: Weights,
    w3: Weights,
    w2: Weights,
    probs: Tensor | None = None,
    *,
    prob_in: Literal["combine", "swiglu"] = "swiglu",
    biases: tuple[Bias, Bias, Bias] | None = None,
    activation: SwiGLU = PLAIN,
    recipe: Recipe | str = "mxfp8",
    group: "str | dist.ProcessGroup | None" = None,
    transport: PeerMemory | None = None,
) -> Tensor:
    """Compute the SwiGLU feed-forward of experts on the ranks of a group.

    The result is differentiable in rows, weights, biases and probs. It and all gradients have the same bytes as from
    `dispatch`, `grouped_swiglu_ffn` and `combine`. The host waits for the counts, over `PeerMemory` without
    rounds for nothing; with rounds the weight gradients of a split expert are sums. All ranks need a gradient of the
    rows, or none does.

    Args:
        rows: As in `dispatch`.
        counts: As in `dispatch`.
        w1: (G, F, D), of this rank's experts, as in `grouped_swiglu_ffn`.
        w3: (G, F, D), of this rank's experts.
        w2: (G, D, F), of this rank's experts.
        probs: (T, top_k) float32, weights of the replicas of TokenReplicas; or None.
        prob_in: The place where probs weights a row: "combine" or "swiglu", as in `RouterConfig`. `PeerMemory` takes
            no "combine".
        biases: (b1, b3, b2) of this rank's experts, as in `grouped_swiglu_ffn`; or None.
        activation: A `SwiGLU`.
        recipe: As in `dispatch`.
        group: As in `dispatch`.
        transport: As in `expert_parallel_mm`.

    Returns:
        (M, D) rows, or of TokenReplicas (T, D), bfloat16.

    Raises:
        ValueError: For shapes and values that are not allowed. An error on one rank raises on all ranks, and no row is
            sent. With `PeerMemory`, after the first call, the other ranks wait until their timeout.
        TypeError: For other dtypes and types, in the same way.

    Example:
        >>> w = torch.full((1, 32, 32), 1 / 32)
        >>> expert_parallel_ffn(torch.ones(1, 32), torch.tensor([1]), w, w, w)[0, 0].item()  # as grouped_swiglu_ffn
        0.75
    """
    op, weights = "expert_parallel_ffn", (w1, w3, w2)
    request = Request(op, rows, counts, RECIPES["bf16"], probs=probs, out_dtype=torch.bfloat16)

    def make() -> tuple[Request, FFN]:
        of = Recipe.parse(recipe)
        if prob_in not in ("combine", "swiglu"):
            fail(ValueError, op, "prob_in", repr(prob_in), "allowed: 'combine' or 'swiglu'")
        save_bytes = all(not isinstance(w, Tensor) or outlives_forward(w) for w in weights)
        options = FFNOptions(of, activation, save_bytes=save_bytes)
        experts = FFN("grouped_swiglu_ffn", weights, Biases.check(op, biases), options)
        return request._replace(recipe=of, inside=prob_in == "swiglu"), experts

    return _over(transport, group, request, make)


def _over(
    transport: PeerMemory | None, group: "str | dist.ProcessGroup | None", request: Request,
    make: Callable[[], tuple[Request, FFN | MM]],
) -> Tensor:  # fmt: skip
    """The result of a request over the ranks of a group. make: the request with its options, and the experts; what it
    raises on one rank is raised on all."""
    name = name_of(request.op, "group", group)
    ranks, usable = Ranks(name, degree_of(name), 0, ""), None
    try:
        _check_transport(request.op, transport, name)
        usable = transport
        request, experts = make()
        found = experts.local_experts(request._replace(ranks=ranks))
    except (TypeError, ValueError) as error:
        if ranks.degree > 1 and usable is not None:
            usable.raise_error(error, ranks)
        if ranks.degree > 1:
            agree_on_counts(request._replace(ranks=ranks, error=error))
        raise
    trained = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in found.parameters)
    # Without a gradient of the rows, trained experts decide whether a rank takes part in the backward.
    request = request._replace(ranks=ranks, also={"gradients": "experts alone" if trained else "none"})
    exchange = choose_exchange(transport if ranks.degree > 1 else None)
    rows, prob, handle = exchange.dispatch(request)
    return exchange.combine(handle.layout.run(experts, rows, prob), handle, request)


def _check_transport(op: str, transport: PeerMemory | None, group_name: str) -> None:
    """Raise unless the transport is of the group."""
    if not isinstance(transport, PeerMemory | None):
        fail(TypeError, op, "transport", repr(transport), "allowed: a PeerMemory of the group, or None")
    if transport is not None and transport.group.group_name != group_name:
        got, allowed = f"one of group {transport.group.group_name!r}", f"allowed: one of {group_name!r}, the call's"
        fail(ValueError, op, "transport", got, allowed)
