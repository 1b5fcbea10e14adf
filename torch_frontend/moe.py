"""A complete Mixture-of-Experts layer, with expert parallelism on or off.

    x (T, D) --router--> top_k experts and probabilities p per token
       |
       '--sort_by_expert--> replicas --dispatch--> groups (P, D) --experts (ffn.py)--> groups (P, D)
                                                                                          |
    y (T, D) <------------------ sum over a token's replicas, weighted by p <--combine----'

prob_in = "swiglu": p is sent with the rows, the experts compute w2 (p silu(w1 x) * w3 x), and the last sum is
unweighted. Its gradient reads no rows, so none are saved: T K D 2 bytes of activations less, for 4 bytes a row on the
wire.

T tokens   D dim   F hidden_dim   E experts   K top_k   P rows of padded groups      suffixes below name the dims
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
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
from ._torch_private import version_of
from .ffn import swiglu_ffn
from .permute import sort_by_expert
from .pipeline import TokenReplicas, combine, dispatch_over, dispatch_probs, refuse
from .shards import Ranks, replicated, sharded
from .weights import QuantizedWeights, outlives_forward, quantize_weights

SCORES = ("softmax", "sigmoid")
PROB_IN = ("combine", "swiglu")


class MoEStats(NamedTuple):
    """Statistics of one forward.

    counts: (E,) int32, rows of each expert, summed over the ranks that share the experts.
    aux_loss: fp32 scalar, E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch
        Transformer, equation 4). The fractions cover the tokens of all ranks, the probabilities those of this rank. The
        mean of aux_loss over the ranks is the auxiliary loss of their batch, and the same holds for its gradient.
    overflow: int32 scalar, rows that did not fit; 0, since no row is dropped.
    """

    counts: Tensor
    aux_loss: Tensor
    overflow: Tensor


def _shares(scores: Tensor) -> Tensor:
    """Scores divided by their sum along the last dim; zeros if every sigmoid underflowed to zero."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


class GroupedExperts(nn.Module):
    """SwiGLU experts as 3D parameters: w1, w3 (E, F, D) and w2 (E, D, F); y = w2 (silu(w1 x) * w3 x).

    dim, hidden_dim: multiples of 32. recipe: a Recipe or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise" or
    "bf16". dtype: of the parameters. bias: adds b1, b3 (E, F) and b2 (E, D), zeros at first, to the three products.
    activation: a `SwiGLU`.

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

    dim, hidden_dim: multiples of 32. score_func: "softmax" over all experts or "sigmoid" of each, in fp32. normalize:
        divide the top_k scores of a token by their sum.
    recipe: a Recipe or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise" or "bf16".
    prob_in: the place where a row is multiplied by its probability. "combine": the fp32 sum of the experts' outputs.
        "swiglu": inside the experts, before h is rounded; the combine then saves no rows for its gradient.
    bias, activation: of the experts, as in `GroupedExperts`.
    dtype: of the parameters.

    forward(x): x (..., D) bfloat16 or float32 -> (y like x, MoEStats). Expert parallelism is
    `parallelize_module(moe, mesh, MXFP8ExpertParallel())`; x is then this rank's tokens, and `MXFP8ExpertParallel`
    documents the loss and the gradients.

    Raises ValueError and TypeError for sizes, names and dtypes that are not allowed.

    >>> moe = MoE(32, 64, num_experts=4, top_k=2)
    >>> y, stats = moe(torch.randn(5, 32))
    >>> y.shape, stats.counts.sum().item()
    (torch.Size([5, 32]), 10)
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        score_func: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
        recipe: Recipe | str = "mxfp8",
        prob_in: Literal["combine", "swiglu"] = "combine",
        bias: bool = False,
        activation: SwiGLU = PLAIN,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_sizes("MoE", {"dim": dim, "hidden_dim": hidden_dim}, {"num_experts": num_experts, "top_k": top_k})
        if not 1 <= top_k <= num_experts:
            fail(ValueError, "MoE", "top_k", top_k, f"allowed: 1 to num_experts = {num_experts}")
        if score_func not in SCORES:
            fail(ValueError, "MoE", "score_func", repr(score_func), f"allowed: {' or '.join(map(repr, SCORES))}")
        if prob_in not in PROB_IN:
            fail(ValueError, "MoE", "prob_in", repr(prob_in), f"allowed: {' or '.join(map(repr, PROB_IN))}")
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.normalize, self.prob_in = score_func, normalize, prob_in
        self.router = nn.Linear(dim, num_experts, bias=False, dtype=dtype, device=device)
        options = {"bias": bias, "activation": activation}
        self.experts = GroupedExperts(dim, hidden_dim, num_experts, recipe, dtype, device, **options)

    def reset_parameters(self) -> None:
        self.router.reset_parameters()
        self.experts.reset_parameters()

    def weights_held(self) -> AbstractContextManager[None]:
        """`GroupedExperts.weights_held` of the experts."""
        return self.experts.weights_held()

    def forward(self, x: Tensor) -> tuple[Tensor, MoEStats]:
        ranks = self.experts.expert_parallel
        try:
            self._check(x)
        except (TypeError, ValueError):
            if ranks is not None:
                refuse(ranks)
            raise
        x_TD = x.reshape(-1, x.shape[-1])
        probs_TK, experts_TK, scores_TE = self._route(x_TD)
        order, inverse, counts = sort_by_expert(experts_TK, self.num_experts)
        tokens = TokenReplicas(x_TD.to(torch.bfloat16), order, inverse, self.top_k)
        groups, padded_counts, route = dispatch_over(tokens, counts, self.experts.recipe, ranks)
        if self.prob_in == "swiglu":
            out = self.experts(groups, padded_counts, dispatch_probs(probs_TK, route))
            y_TD = combine(out, route, out_dtype=x_TD.dtype)
        else:
            out = self.experts(groups, padded_counts)
            y_TD = combine(out, route, probs_TK, out_dtype=x_TD.dtype)
        counts = route.counts
        rows = counts.sum().clamp_min(1)
        mean_prob_E = scores_TE.sum(0) / (rows / (self.top_k * (ranks.degree if ranks else 1)))
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

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return probabilities and experts (T, K) of each token's choice, and the scores (T, E) as probabilities.

        Equal scores are ordered by expert."""
        router = replicated(self.router.weight, self.experts.expert_parallel)
        kind = "cpu" if x_TD.is_meta else x_TD.device.type  # meta has no autocast
        with torch.autocast(kind, enabled=False):
            logits_TE = F.linear(x_TD.float(), router.float())
        scores_TE = logits_TE.softmax(-1) if self.score_func == "softmax" else logits_TE.sigmoid()
        # A stable sort orders equal scores by expert, as JAX's top_k does; torch.topk leaves their order open.
        sorted_TE, experts_TE = scores_TE.sort(dim=-1, descending=True, stable=True)
        chosen_TK, experts_TK = sorted_TE[:, : self.top_k], experts_TE[:, : self.top_k]
        if self.normalize:
            chosen_TK = _shares(chosen_TK)
        return chosen_TK, experts_TK, _shares(scores_TE)
