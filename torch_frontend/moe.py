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
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from ..core_kernels.router.plan import OPTIONS, check_options
from ..core_kernels.swiglu.activation import PLAIN, SwiGLU
from ._call import require_tensor
from ._checks import (
    check_counts,
    check_devices,
    check_flag,
    check_floats,
    check_int,
    check_plain,
    check_probs,
    check_shape,
    reads_values,
    require_rows,
)
from ._ranges import named
from ._torch_private import version_of
from .ffn import swiglu_ffn
from .permute import sort_by_expert
from .pipeline import TokenReplicas, combine, dispatch_over, dispatch_probs, refuse
from .router import GroupScore, Routing, ScoreFunc, chosen_outside, router_logits
from .router import route as choose_experts
from .shards import Ranks, replicated, sharded
from .weights import QuantizedWeights, outlives_forward, quantize_weights

PROB_IN = ("combine", "swiglu")


class MoEStats(NamedTuple):
    """Statistics of one forward.

    counts: (E,) int32, rows of each expert, summed over the ranks that share the experts.
    aux_loss: fp32 scalar, E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch
        Transformer, equation 4). The fractions cover the tokens of all ranks, the probabilities those of this rank. The
        mean of aux_loss over the ranks is the auxiliary loss of their batch, and the same holds for its gradient. 0 if
        the caller chose the experts.
    overflow: int32 scalar, rows that did not fit; 0, since no row is dropped.
    """

    counts: Tensor
    aux_loss: Tensor
    overflow: Tensor


class GroupedExperts(nn.Module):
    """SwiGLU experts as 3D parameters: w1, w3 (E, F, D) and w2 (E, D, F); y = w2 (silu(w1 x) * w3 x).

    dim, hidden_dim: multiples of 32. recipe: a Recipe or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise",
    "fp8_blockwise" or "bf16". dtype: of the parameters. bias: adds b1, b3 (E, F) and b2 (E, D), zeros at first, to the
    three products. activation: a `SwiGLU`.

    forward(groups, padded_counts, probs=None): groups (P, D), one padded group per local expert, bf16 or MXTensor;
    padded_counts (local experts,) of an integer dtype, multiples of 32; probs (P,) float32, a weight for each row of y.
    Returns (P, D) bf16. Under MXFP8ExpertParallel the groups are those of `dispatch` on this rank.

    >>> experts = GroupedExperts(32, 64, num_experts=2)
    >>> experts(torch.ones(64, 32), torch.tensor([32, 32])).shape
    torch.Size([64, 32])

    Raises ValueError and TypeError for sizes, recipes and counts that are not allowed.
    """

    expert_parallel: Ranks | None = None
    """The ranks that share the experts, set by MXFP8ExpertParallel; None is this process alone."""

    b1: Tensor | None
    b2: Tensor | None
    b3: Tensor | None
    _held: "_HeldWeights | None" = None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        recipe: Recipe | str = "mxfp8",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        bias: bool = False,
        activation: SwiGLU = PLAIN,
    ) -> None:
        super().__init__()
        _check_sizes("GroupedExperts", {"dim": dim, "hidden_dim": hidden_dim}, {"num_experts": num_experts})
        check_flag("GroupedExperts", "bias", bias)
        self.num_experts, self.recipe = num_experts, Recipe.parse(recipe)
        self.activation = SwiGLU.check("GroupedExperts", activation)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, dtype=dtype, device=device))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, dtype=dtype, device=device))
        for name, n in (("b1", hidden_dim), ("b2", dim), ("b3", hidden_dim)):
            value = nn.Parameter(torch.empty(num_experts, n, dtype=dtype, device=device)) if bias else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for w in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(w, std=w.shape[-1] ** -0.5)
        for b in (self.b1, self.b2, self.b3):
            if b is not None:
                nn.init.zeros_(b)

    def extra_repr(self) -> str:
        (e, f, d), bias = self.w1.shape, self.b1 is not None
        sizes = f"dim={d}, hidden_dim={f}, num_experts={e}, recipe={self.recipe.name!r}, bias={bias}"
        return f"{sizes}, activation={self.activation}"

    def forward(self, groups_PD: Tensor, padded_counts: Tensor, probs_P: Tensor | None = None) -> Tensor:
        op = "GroupedExperts.forward"
        parameters = self.w1, self.w3, self.w2
        weights = tuple(sharded(w, self.expert_parallel) for w in parameters)
        check_floats(op, "groups_PD", groups_PD)
        check_shape(op, "groups_PD", groups_PD, ("P", weights[0].shape[2]))
        check_counts(op, "padded_counts", padded_counts, groups_PD.device)
        check_shape(op, "padded_counts", padded_counts, (weights[0].shape[0],))
        if reads_values(padded_counts):
            require_rows(op, "padded_counts", padded_counts, groups_PD.shape[0])
        if self.recipe.wgrad_mx and torch.is_grad_enabled():
            self._check_blocks(op, groups_PD.shape[0], padded_counts)
        if probs_P is not None:
            check_probs(op, "probs_P", probs_P, groups_PD.shape[:1], groups_PD.device)
        ends = torch.cumsum(padded_counts, 0, dtype=torch.int32)
        if self._held is not None:
            weights = self._held.weights_of(parameters, weights)
        save_bytes = all(outlives_forward(w) for w in parameters)
        biases = [b if b is None else sharded(b, self.expert_parallel) for b in (self.b1, self.b3, self.b2)]
        options = self.recipe, False, save_bytes, biases, self.activation
        return swiglu_ffn(op, groups_PD, weights, ends, probs_P, *options)

    def _check_blocks(self, op: str, rows: int, padded_counts: Tensor) -> None:
        """Raise unless every group is whole blocks of 32 tokens, along which the weight gradient quantizes."""
        allowed = f"allowed: multiples of {BLOCK}, as `dispatch` returns them"
        if rows % BLOCK:
            fail(ValueError, op, "groups_PD", f"P = {rows}", allowed)
        if reads_values(padded_counts) and (padded_counts % BLOCK).any():
            fail(ValueError, op, "padded_counts", padded_counts.tolist(), allowed)

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        """Quantize the weights once, at the beginning of the block, instead of in every call.

        For microbatches of one optimizer step, evaluation and serving. The bytes take 2.06 bytes per weight, 4 for
        exact products on Hopper. Calls and the end of the block raise RuntimeError if a version counter shows a write
        to a weight; version counters do not count writes through `.data`, by collectives or by other processes.

        >>> experts = GroupedExperts(32, 64, num_experts=2)
        >>> with experts.weights_held():
        ...     y = experts(torch.ones(64, 32), torch.tensor([32, 32]))

        Raises ValueError for weights that FSDP has sharded, which are gathered in every call.
        """
        before, held = self._held, _HeldWeights.of(self)
        self._held = held
        try:
            yield
        finally:
            self._held = before
        held.check((self.w1, self.w3, self.w2))


class _HeldWeights(NamedTuple):
    """Quantized w1, w3 and w2, and the states of the parameters, which change with a write."""

    quantized: tuple[QuantizedWeights, ...]
    states: tuple[tuple[int, ...], ...]

    @classmethod
    @torch.no_grad()
    def of(cls, experts: GroupedExperts) -> "_HeldWeights":
        parameters = experts.w1, experts.w3, experts.w2
        degree = experts.expert_parallel.degree if experts.expert_parallel else 1
        parts = tuple(sharded(w, None) for w in parameters)
        for name, part, w in zip(("w1", "w3", "w2"), parts, parameters, strict=True):
            whole = (experts.num_experts // degree, *w.shape[1:])
            if part.shape != whole:
                got, allowed = f"a shard {tuple(part.shape)}", f"allowed: {whole}, all of this rank's experts"
                fail(ValueError, "weights_held", name, got, allowed)
        return cls(tuple(quantize_weights(p, experts.recipe) for p in parts), tuple(map(_state, parameters)))

    def check(self, parameters: tuple[Tensor, ...]) -> None:
        for name, w, state in zip(("w1", "w3", "w2"), parameters, self.states, strict=True):
            if _state(w) != state:
                allowed = "allowed: none; leave the block, write, and enter it again"
                fail(RuntimeError, "weights_held", name, "a write within the block", allowed)

    def weights_of(self, parameters: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> tuple[QuantizedWeights, ...]:
        """The held bytes with `values`, which receive the gradients."""
        if not torch.compiler.is_compiling():
            self.check(parameters)
        return tuple(held.with_values(w) for held, w in zip(self.quantized, values, strict=True))


@torch.no_grad()
def _state(parameter: Tensor) -> tuple[int, ...]:
    # A DTensor counts the writes to itself, its local part those through `to_local()`.
    part = sharded(parameter, None)
    return version_of(parameter), version_of(part), part.data_ptr()


def _check_sizes(op: str, blocks: dict[str, int], others: dict[str, int]) -> None:
    """Raise unless all are positive ints, the first ones multiples of 32."""
    for name, size in (blocks | others).items():
        check_int(op, name, size, 1)
    for name, size in blocks.items():
        if size % BLOCK:
            fail(ValueError, op, name, size, f"allowed: positive multiples of {BLOCK}")


class MoE(nn.Module):
    """Mixture of SwiGLU experts with top-k routing.

    dim, hidden_dim: multiples of 32.
    score_func, normalize, route_scale, num_groups, top_k_groups, group_score, force_balance: the choice of experts and
        their weights, as in `route`. The router computes in fp32.
    selection_bias: keep a buffer `selection_bias` (E,) float32, zeros at first, that is added to the scores for the
        choice; `update_selection_bias` balances the load with it.
    router_bias: add a learned bias to the logits.
    shared_hidden_dim: the hidden size of a shared expert, which takes every token and is added to y; None is no shared
        expert.
    recipe: a Recipe or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".
    prob_in: the place where a row is multiplied by its probability. "swiglu": inside the experts, before h
        is rounded; the combine then saves no rows for its gradient and moves quantized tokens backward. "combine": the
        fp32 sum of the experts' outputs; faster with b2, which the experts otherwise add in a pass of its own.
    bias, activation: of the experts, as in `GroupedExperts`. The shared expert has the activation and no bias.
    dtype: of the parameters. With bf16 x and parameters the router multiplies bf16 values and keeps fp32 sums.

    forward(x, experts=None, weights=None): x (..., D) bfloat16 or float32 -> (y like x, MoEStats). experts (..., k)
    int32 or int64 and weights (..., k) float32 replace the router: the caller has chosen k different experts for each
    token; y is differentiable in weights. Expert parallelism is
    `parallelize_module(moe, mesh, MXFP8ExpertParallel())`; x is then this rank's tokens, and `MXFP8ExpertParallel`
    documents the loss and the gradients.

    Raises ValueError and TypeError for sizes, names and dtypes that are not allowed.

    >>> moe = MoE(32, 64, num_experts=4, top_k=2)
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
        top_k: int,
        *,
        score_func: ScoreFunc = "softmax",
        normalize: bool = True,
        route_scale: float = 1.0,
        num_groups: int = 1,
        top_k_groups: int = 1,
        group_score: GroupScore = "top2",
        selection_bias: bool = False,
        force_balance: bool = False,
        router_bias: bool = False,
        shared_hidden_dim: int | None = None,
        recipe: Recipe | str = "mxfp8",
        prob_in: Literal["combine", "swiglu"] = "swiglu",
        bias: bool = False,
        activation: SwiGLU = PLAIN,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_sizes("MoE", {"dim": dim, "hidden_dim": hidden_dim}, {"num_experts": num_experts, "top_k": top_k})
        choice = score_func, normalize, route_scale, num_groups, top_k_groups, group_score, force_balance
        self.route_options: dict[str, Any] = dict(zip(OPTIONS, choice, strict=True))
        check_options("MoE", num_experts, top_k=top_k, **self.route_options)
        check_flag("MoE", "selection_bias", selection_bias)
        check_flag("MoE", "router_bias", router_bias)
        if prob_in not in PROB_IN:
            fail(ValueError, "MoE", "prob_in", repr(prob_in), f"allowed: {' or '.join(map(repr, PROB_IN))}")
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.normalize, self.prob_in = score_func, normalize, prob_in
        self.router = nn.Linear(dim, num_experts, bias=router_bias, dtype=dtype, device=device)
        zeros = torch.zeros(num_experts, dtype=torch.float32, device=device) if selection_bias else None
        self.register_buffer("selection_bias", zeros)
        options = {"bias": bias, "activation": activation}
        self.experts = GroupedExperts(dim, hidden_dim, num_experts, recipe, dtype, device, **options)
        self.shared_expert = None
        if shared_hidden_dim is not None:
            _check_sizes("MoE", {"shared_hidden_dim": shared_hidden_dim}, {})
            sizes = dim, shared_hidden_dim, 1
            self.shared_expert = GroupedExperts(*sizes, recipe, dtype, device, activation=activation)

    def reset_parameters(self) -> None:
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        """`GroupedExperts.weights_held` of the experts and of the shared expert."""
        with ExitStack() as held:
            held.enter_context(self.experts.weights_held())
            if self.shared_expert is not None:
                held.enter_context(self.shared_expert.weights_held())
            yield

    def forward(
        self, x: Tensor, experts: Tensor | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, MoEStats]:
        ranks = self.experts.expert_parallel
        try:
            self._check(x)
            outside = chosen_outside("MoE", x, self.num_experts, experts, weights)
        except (TypeError, ValueError):
            if ranks is not None:
                refuse(ranks)
            raise
        x_TD = x.reshape(-1, x.shape[-1])
        experts_TK, probs_TK, shares_E = self._route(x_TD) if outside is None else outside
        order, inverse, counts = sort_by_expert(experts_TK, self.num_experts)
        top_k = experts_TK.shape[1]
        tokens = TokenReplicas(x_TD.to(torch.bfloat16), order, inverse, top_k)
        groups, padded_counts, route = dispatch_over(tokens, counts, self.experts.recipe, ranks)
        if self.prob_in == "swiglu":
            out = self.experts(groups, padded_counts, dispatch_probs(probs_TK, route))
            y_TD = combine(out, route, out_dtype=x_TD.dtype)
        else:
            out = self.experts(groups, padded_counts)
            y_TD = combine(out, route, probs_TK, out_dtype=x_TD.dtype)
        if self.shared_expert is not None:
            y_TD = y_TD + self._shared(x_TD, ranks).to(y_TD.dtype)
        counts = route.counts
        rows = counts.sum().clamp_min(1)
        mean_prob_E = shares_E / (rows / (top_k * (ranks.degree if ranks else 1)))
        aux_loss = self.num_experts * (counts / rows * mean_prob_E).sum()
        return y_TD.view(x.shape), MoEStats(counts, aux_loss, counts.new_zeros(()))

    def _check(self, x: Tensor) -> None:
        check_plain("MoE", "x", x)
        require_tensor("MoE", "x", x)
        check_devices("MoE", "the router", self.router.weight.device, x=x)
        if x.dtype not in (torch.bfloat16, torch.float32):
            fail(TypeError, "MoE", "x", f"dtype {x.dtype}", "allowed: bfloat16 or float32")
        dim = self.router.in_features
        if x.dim() < 1 or x.shape[-1] != dim:
            fail(ValueError, "MoE", "x", f"shape {tuple(x.shape)}", f"allowed: (..., {dim})")

    @named("mxep.route")
    def _route(self, x_TD: Tensor) -> Routing:
        ranks, bias = self.experts.expert_parallel, self.router.bias
        bias = None if bias is None else replicated(bias, ranks)
        logits_TE = router_logits(x_TD, replicated(self.router.weight, ranks), bias)
        return choose_experts(logits_TE, self.top_k, selection_bias=self.selection_bias, **self.route_options)

    def _shared(self, x_TD: Tensor, ranks: Ranks | None) -> Tensor:
        """(T, D) bf16: the shared expert, one group of all tokens. Its weights are those of every rank."""
        expert = self.shared_expert
        assert expert is not None
        parameters = expert.w1, expert.w3, expert.w2
        weights = tuple(replicated(w, ranks) for w in parameters)
        if expert._held is not None:
            weights = expert._held.weights_of(parameters, weights)
        tokens = x_TD.shape[0]
        ends = torch.full((1,), tokens, dtype=torch.int32, device=x_TD.device)
        pad, save_bytes = tokens % BLOCK != 0, all(outlives_forward(w) for w in parameters)
        options = expert.recipe, pad, save_bytes
        tokens_TD = x_TD.to(torch.bfloat16)
        return swiglu_ffn("MoE", tokens_TD, weights, ends, None, *options, activation=expert.activation)
