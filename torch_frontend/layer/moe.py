"""A complete Mixture-of-Experts layer, with expert parallelism on or off.

    x (T, D) --router (router.py)--> top_k experts and probabilities p per token
       |
       '--sort_by_expert--> replicas --dispatch--> groups (P, D) --experts (ffn.py)--> groups (P, D)
                                                                                          |
    y (T, D) <------------------ sum over a token's replicas, weighted by p <--combine----'
       '--shared expert (every token)--> added to y

prob_in = "swiglu": p is sent with the rows, the experts compute w2 (p silu(w1 x) * w3 x), and the last sum is
unweighted. Its gradient reads no rows, so none are saved: T K D 2 bytes of activations less, for 4 bytes a row on the
wire.

T tokens   D dim   F hidden_dim   E experts   K top_k   P rows of padded groups      suffixes below name the dims
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ...core_kernels.launch import fail
from ...core_kernels.policy.metrics import MoEMetrics, describe
from ...core_kernels.policy.prob_in import ProbIn
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.policy.router import RouterConfig, SharedExpert, check_router, check_shared
from ...core_kernels.swiglu.activation import PLAIN, SwiGLU
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request
from ..exchange.exchange import Handle, Layout
from ..exchange.shards import ALONE, check_group, replicated
from ..ops import direct as ops
from ..ops.call import require_tensor
from ..ops.checks import check_autocast, check_flag, check_plain
from ..ops.launch import check_devices
from ..ops.ranges import named
from ..routing.router import Routing, external_routing, route_tokens
from ..routing.weighted_combine import sum_of_slots, weigh_slots
from .experts import GroupedExperts, SharedFFN, check_sizes


class MoEStats(NamedTuple):
    """Statistics of one forward.

    Args:
        counts: (E,) int32, rows of each expert, summed over the ranks that share the experts.
        aux_loss: fp32 scalar, E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch
            Transformer, equation 4). The fractions cover the tokens of all ranks, the probabilities the tokens of this
            rank. The mean of aux_loss over the ranks is the auxiliary loss of their batch, and the same holds for its
            gradient. 0 if the caller chose the experts.
        overflow: int32 scalar, rows that did not fit; 0, since no row is dropped.

    Example:
        >>> moe = MoE(32, 64, num_experts=2, router=RouterConfig(top_k=1))
        >>> _, stats = moe(torch.ones(3, 32))
        >>> stats.counts.sum().item(), stats.overflow.item()
        (3, 0)
    """

    counts: Tensor
    aux_loss: Tensor
    overflow: Tensor

    def metrics(
        self, dim: int, *, recipe: Recipe | str = "mxfp8", ranks: int = 1, prob_in: ProbIn = "swiglu"
    ) -> MoEMetrics:
        """Compute the metrics of this forward as Python numbers; the host waits for the device.

        Args:
            dim: Of the layer.
            recipe: Of the layer.
            ranks: Ranks that share the experts, a divisor of their number.
            prob_in: Of the layer's `RouterConfig`.

        Returns:
            A dict, whose entries `MoEMetrics` describes.

        Raises:
            TypeError: For sizes that are no int.
            ValueError: For sizes and names that are not allowed.

        Example:
            >>> moe = MoE(32, 64, 4, RouterConfig(2, force_balance=True))
            >>> _, stats = moe(torch.ones(6, 32))
            >>> metrics = stats.metrics(32, ranks=2)
            >>> metrics["tokens_per_expert"], metrics["imbalance"], metrics["wire_nbytes"]
            ([3, 3, 3, 3], 1.0, 2424)
        """
        return describe(self.counts.tolist(), int(self.overflow), dim, Recipe.parse(recipe), ranks, prob_in)


class MoE(nn.Module):
    """Mixture of SwiGLU experts with top-k routing.

    Args:
        dim: D, a positive multiple of 32.
        hidden_dim: F of the experts, a positive multiple of 32.
        num_experts: E.
        router: A `RouterConfig`: the experts of a token and their weights. The router computes in fp32.
        shared: A `SharedExpert`, which takes every token and is added to y; None is no shared expert.
        recipe: A Recipe or its name, as in `GroupedExperts`.
        bias: The experts have biases, as in `GroupedExperts`. The shared expert has none.
        activation: A `SwiGLU`, of the experts and of the shared expert.
        recompute: Of the experts and the shared expert, as in `GroupedExperts`.
        dtype: Of the parameters. With bf16 x and parameters the router multiplies bf16 values and keeps fp32 sums.
        device: Of the parameters.

    Raises:
        ValueError: For sizes and names that are not allowed.
        TypeError: For values of another type, and under autocast to float16.

    The forward is `moe(x, experts=None, weights=None)`.

    - x: (..., D) bfloat16 or float32.
    - experts: (..., k) int32 or int64, which replaces the router's choice: the caller has chosen k experts for each
      token. An expert that a token has twice counts twice, as two experts with the same weights.
    - weights: (..., k) float32, given with experts. y is differentiable in weights.
    - It returns y, like x, and `MoEStats`.

    Expert parallelism is `parallelize_module(moe, mesh, ExpertParallel())`; x is then this rank's tokens.
    `ExpertParallel` documents the loss and the gradients.

    `experts` and `shared_expert` are called as modules, with their hooks. The layer reads the weights of `router` and
    of `shared_gate` itself: forward hooks of these two do not run.

    Autocast to bfloat16 changes no output, but through a shared gate in fp32.

    y of a token does not depend on the other tokens of the call. Exceptions on a CPU: fp32 router products of one row,
    a shared gate in fp32, and GEMMs of large dims whose fp32 sums are not exact (recipes "bf16", "fp8_blockwise").

    Example:
        >>> moe = MoE(32, 64, 4, RouterConfig(2), shared=SharedExpert(64))
        >>> y, stats = moe(torch.randn(5, 32))
        >>> y.shape, stats.counts.sum().item()
        (torch.Size([5, 32]), 10)
    """

    selection_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        router: RouterConfig,
        *,
        shared: SharedExpert | None = None,
        recipe: Recipe | str = "mxfp8",
        bias: bool = False,
        activation: SwiGLU = PLAIN,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_sizes("MoE", {"dim": dim, "hidden_dim": hidden_dim}, {"num_experts": num_experts})
        self.router_config = check_router("MoE", router, num_experts)
        shared = check_shared("MoE", shared)
        check_flag("MoE", "bias", bias)
        check_flag("MoE", "recompute", recompute)
        SwiGLU.check("MoE", activation)
        self.num_experts = num_experts
        self.router = nn.Linear(dim, num_experts, bias=router.bias, dtype=dtype, device=device)
        zeros = torch.zeros(num_experts, dtype=torch.float32, device=device) if router.selection_bias else None
        self.register_buffer("selection_bias", zeros)
        options: dict[str, Any] = {"activation": activation, "recompute": recompute}
        self.experts = GroupedExperts(dim, hidden_dim, num_experts, recipe, dtype, device, bias=bias, **options)
        self.shared_gate = self.shared_expert = None
        if shared is not None:
            gate = nn.Linear(dim, 1, bias=False, dtype=dtype, device=device) if shared.gate else None
            self.shared_gate = gate
            self.shared_expert = SharedFFN(dim, shared.hidden_dim, 1, recipe, dtype, device, **options)

    def _apply(self, *args: Any, **options: Any) -> Self:
        """As torch's, but for the selection bias, which `.to(torch.bfloat16)` leaves in float32: an update is 0.001."""
        before = self.selection_bias
        super()._apply(*args, **options)
        if before is not None and self.selection_bias is not None and self.selection_bias.dtype != before.dtype:
            self.selection_bias = before.to(self.selection_bias.device)
        return self

    def reset_parameters(self) -> None:
        for part in (self.router, self.experts, self.shared_expert, self.shared_gate):
            if part is not None:
                part.reset_parameters()
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    @contextmanager
    def cached_weights(self) -> Iterator[None]:
        """`GroupedExperts.cached_weights` of the experts and of the shared expert.

        Returns:
            A context manager.

        Example:
            >>> moe = MoE(32, 64, num_experts=2, router=RouterConfig(top_k=1))
            >>> with moe.cached_weights():
            ...     y, stats = moe(torch.ones(3, 32))
        """
        with ExitStack() as held:
            held.enter_context(self.experts.cached_weights())
            if self.shared_expert is not None:
                held.enter_context(self.shared_expert.cached_weights())
            yield

    def forward(
        self, x: Tensor, experts: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, MoEStats]:
        """Run the layer on this rank's tokens.

        Args:
            x: (..., D) bfloat16 or float32.
            experts: (..., k) int32 or int64, the experts of each token, chosen by the caller in place of the router; or
                None.
            weights: (..., k) float32, their weights; None without experts.

        Returns:
            (y, stats): y like x, and a `MoEStats`.

        Raises:
            ValueError: shapes, devices, experts that do not exist.
            TypeError: dtypes.

        Example:
            >>> moe = MoE(32, 64, num_experts=2, router=RouterConfig(top_k=1))
            >>> y, stats = moe(torch.ones(3, 32))
            >>> y.shape, stats.counts.sum().item()
            (torch.Size([3, 32]), 3)
        """
        ranks = self.experts.expert_parallel or ALONE
        try:
            self._check(x)
            outside = external_routing("MoE", x, self.num_experts, experts, weights)
        except (TypeError, ValueError):
            self.experts.exchange.send_error_sentinel(ranks)
            raise
        x_TD = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        x_TD, (experts_TK, probs_TK, shares_E) = self._route(x_TD) if outside is None else (x_TD, outside)
        order, inverse, counts = ops.sort_by_expert(experts_TK.reshape(-1).contiguous(), self.num_experts)
        top_k = experts_TK.shape[1]
        tokens = TokenReplicas(x_TD.to(torch.bfloat16), order, inverse, top_k)
        prob_in = self.router_config.prob_in
        of_input = prob_in == "input"
        if of_input:  # a row per slot, of a weight each
            tokens = TokenReplicas(weigh_slots(x_TD, probs_TK), order, inverse, 1)
        also = self._shared_arguments(outside is not None) if ranks.degree > 1 else {}
        request = Request(
            "MoE", tokens, counts, self.experts.recipe, ranks, probs=None if of_input else probs_TK,
            inside=prob_in == "swiglu", out_dtype=x_TD.dtype, also=also,
        )  # fmt: skip
        y_TD, counts = self._experts(request)
        if of_input:
            y_TD = sum_of_slots(y_TD, top_k, x_TD.dtype)
        if self.shared_expert is not None:
            y_TD = y_TD + self._shared(x_TD).to(y_TD.dtype)
        degree = ranks.degree
        rows = counts.sum().clamp_min(1) if degree > 1 else max(experts_TK.numel(), 1)
        mean_prob_E = shares_E / (rows / (top_k * degree))
        aux_loss = self.num_experts * (counts / rows * mean_prob_E).sum()
        y = y_TD if x.dim() == 2 else y_TD.view(x.shape)
        return y, MoEStats(counts, aux_loss, counts.new_zeros(()))

    def _experts(self, request: Request) -> tuple[Tensor, Tensor]:
        """The sums of the experts' outputs (T, D), and the rows of all ranks per expert."""
        exchange = self.experts.exchange
        groups, prob_P, handle = exchange.dispatch(request)
        out = self.experts(groups, self._layout(handle), prob_P)
        return exchange.combine(out, handle, request), handle.counts

    def _shared_arguments(self, outside: bool) -> dict[str, Any]:
        """What the ranks of this layer must have in common in a call, but for the arguments of `dispatch`. The backward
        sums the gradients of trained parameters over the ranks, so all train the same ones."""
        if torch.compiler.is_compiling():
            return {}
        trained = [name for name, w in self.named_parameters() if w.requires_grad] if torch.is_grad_enabled() else []
        routing = "the caller" if outside else "the router"
        bias = self.router.bias is not None
        prob_in = self.router_config.prob_in
        return {"prob_in": prob_in, "routing": routing, "router.bias": bias, "parameters": ", ".join(trained)}

    def _layout(self, handle: Handle) -> Tensor | Layout:
        """What the experts' forward takes for its groups: experts with a forward of their own take padded_counts."""
        own = type(self.experts).forward is not GroupedExperts.forward
        return handle.layout.padded_counts if own else handle.layout

    def _check(self, x: Tensor) -> None:
        router, ranks = self.router, self.experts.expert_parallel
        if ranks is not None:
            check_group("MoE", ranks, self.experts.exchange.group)
        check_plain("MoE", "x", x)
        require_tensor("MoE", "x", x)
        check_autocast("MoE", x)
        check_devices("MoE", "the router", router.weight.device, x=x)
        if x.dtype not in (torch.bfloat16, torch.float32):
            fail(TypeError, "MoE", "x", f"dtype {x.dtype}", "allowed: bfloat16 or float32")
        dim = router.in_features
        if x.dim() < 1 or x.shape[-1] != dim:
            fail(ValueError, "MoE", "x", f"shape {tuple(x.shape)}", f"allowed: (..., {dim})")

    @named("mxep.route")
    def _route(self, x_TD: Tensor) -> tuple[Tensor, Routing]:
        """The tokens for the experts, and their routing."""
        ranks, router = self.experts.expert_parallel, self.router
        bias = router.bias
        bias = None if bias is None else replicated(bias, ranks)
        return route_tokens(x_TD, replicated(router.weight, ranks), bias, self.selection_bias, self.router_config)

    def _shared(self, x_TD: Tensor) -> Tensor:
        """(T, D): the shared expert, one group of all tokens. Its weights are the same on every rank."""
        assert self.shared_expert is not None
        y_TD = self.shared_expert(x_TD.to(torch.bfloat16))
        if self.shared_gate is None:
            return y_TD
        gate_T1 = x_TD @ replicated(self.shared_gate.weight, self.experts.expert_parallel).to(x_TD.dtype).mT
        return gate_T1.float().sigmoid() * y_TD
