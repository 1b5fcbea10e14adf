"""A complete Mixture-of-Experts layer on the MXFP8 pipeline, with expert parallelism on or off.

x (T, D) --router--> top_k experts and probabilities p per token
   |
   |   one device
   '--quantize--> T rows --to padded groups--> (P, D) --experts (ffn.py)--> (P, D) -----------.
   |                                                                                          |
   |   expert parallel                                                                        |
   '--spread, sorted by expert--> (T K, D) --[dispatch]--> experts --[combine]--> (T K, D) ---|
                                                                                              |
y (T, D) <--weighted_combine: fp32 sum over K of p x row--------------------------------------'

prob_in = "swiglu": p travels with the rows, w2 (p silu(w1 x) * w3 x), and the last sum is unweighted. Its gradient
then reads no rows, so none are saved: T K D 2 bytes of activations less, for 4 bytes a row on the wire.

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
from . import ops
from ._call import require_tensor
from ._checks import (
    check_counts,
    check_devices,
    check_floats,
    check_int,
    check_plain,
    check_probs,
    check_shape,
    reads_values,
    require_rows,
)
from ._torch_private import version_of
from .combine import weighted_combine
from .ep import TokenCopies, a2a_dispatch_mxfp8_fwd_hp_bwd, receive_rows, refuse, send_probs, send_rows
from .ffn import swiglu_ffn
from .mx_tensor import quantize_gradient
from .permute import RowMaps, gather, spread
from .shards import Ranks, replicated, sharded
from .weights import QuantizedWeights, quantize_weights, stays

DEFAULT_RECIPE = "mxfp8_wgrad_with_hp"
SCORES = ("softmax", "sigmoid")
PROB_IN = ("combine", "swiglu")


class MoEStats(NamedTuple):
    """Of the ranks that share the experts. counts (E,) int32: rows that the tokens of all of them send to each expert.
    aux_loss: fp32 scalar, E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch
        Transformer, equation 4). The fractions are of the tokens of all ranks, the probabilities of this rank's; the
        mean over the ranks is the auxiliary loss of their batch, and so is its gradient.
    overflow: int32 scalar, rows that did not fit; always 0 here, nothing is dropped."""

    counts: Tensor
    aux_loss: Tensor
    overflow: Tensor


def _shares(scores: Tensor) -> Tensor:
    """Scores over their sum along the last dim; zeros where every sigmoid has underflowed to zero."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


class GroupedExperts(nn.Module):
    """SwiGLU experts as 3D parameters: w1, w3 (E, F, D) and w2 (E, D, F); y = w2 (silu(w1 x) * w3 x).

    forward(groups, padded_counts, probs=None): groups (P, D), rows of each local expert in one padded group, bf16 or
    MXTensor; padded_counts (local experts,) integers, multiples of 32; probs (P,) float32 weigh the rows of
    silu(w1 x) * w3 x. Returns (P, D) bf16. Computes in bf16 or MXFP8, see `grouped_swiglu_ffn`. Under
    MXFP8ExpertParallel the groups are those that `dispatch` returned on this rank.

    Raises ValueError and TypeError on sizes, recipes and counts that are not allowed.
    """

    expert_parallel: Ranks | None = None
    """Ranks that share the experts, set by MXFP8ExpertParallel; `MoE` then sends them its tokens."""

    _held: "_Held | None" = None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        recipe: Recipe | str = DEFAULT_RECIPE,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_sizes("GroupedExperts", {"dim": dim, "hidden_dim": hidden_dim}, {"num_experts": num_experts})
        self.num_experts, self.recipe = num_experts, Recipe.parse(recipe)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, dtype=dtype, device=device))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for w in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(w, std=w.shape[-1] ** -0.5)

    def extra_repr(self) -> str:
        e, f, d = self.w1.shape
        return f"dim={d}, hidden_dim={f}, num_experts={e}, recipe={self.recipe.name!r}"

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
        if probs_P is not None:
            check_probs(op, "probs_P", probs_P, groups_PD.shape[:1], groups_PD.device)
        ends = torch.cumsum(padded_counts, 0, dtype=torch.int32)
        if self._held is not None:
            weights = self._held.weights_of(parameters, weights)
        stay = all(stays(w) for w in parameters)
        return swiglu_ffn(op, groups_PD, weights, ends, probs_P, self.recipe, False, stay)

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        """Within the block the weights are quantized once, at its beginning, and not in every call.

        For microbatches of one optimizer step, evaluation and serving. They are 2.06 bytes per weight more, 4 for
        exact products on Hopper. Calls and the end of the block raise RuntimeError if a weight was written since, as
        far as version counters tell: they do not count writes through `.data`, collectives or other processes.

        >>> experts = GroupedExperts(32, 64, num_experts=2)
        >>> with experts.weights_held():
        ...     y = experts(torch.ones(64, 32), torch.tensor([32, 32]))

        Raises ValueError for weights that FSDP has sharded: they are gathered in every call.
        """
        before, held = self._held, _Held.of(self)
        self._held = held
        try:
            yield
        finally:
            self._held = before
        held.check((self.w1, self.w3, self.w2))


class _Held(NamedTuple):
    """Quantized w1, w3 and w2, and what tells that one of them was written since."""

    quantized: tuple[QuantizedWeights, ...]
    states: tuple[tuple[int, ...], ...]

    @classmethod
    @torch.no_grad()
    def of(cls, experts: GroupedExperts) -> "_Held":
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
        """The bytes, for values that get the gradients."""
        if not torch.compiler.is_compiling():
            self.check(parameters)
        return tuple(held.with_values(w) for held, w in zip(self.quantized, values, strict=True))


@torch.no_grad()
def _state(parameter: Tensor) -> tuple[int, ...]:
    # A DTensor counts its own writes, its local part those through `to_local()`.
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

    dim, hidden_dim: multiples of 32. score_func: "softmax" over all experts or "sigmoid" of each, in
    fp32. normalize: divide the top_k scores of a token by their sum. recipe: a Recipe or one of
    "mxfp8_wgrad_with_hp", "mxfp8", "bf16". dtype: of the parameters; experts compute in bf16 or MXFP8.
    prob_in: where a row is weighed by its probability: in the "combine" of the experts' outputs, in fp32, or inside
    "swiglu", whose result is then rounded; the combine saves no rows for its gradient there.

    forward(x): x (..., D) bfloat16 or float32 -> (y like x, MoEStats). For expert parallelism:
    `parallelize_module(moe, mesh, MXFP8ExpertParallel())`; x is then this rank's tokens, and `MXFP8ExpertParallel` says
    what the loss and the gradients are.

    Raises ValueError and TypeError on sizes, names and dtypes that are not allowed.

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
        recipe: Recipe | str = DEFAULT_RECIPE,
        prob_in: Literal["combine", "swiglu"] = "combine",
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
        self.experts = GroupedExperts(dim, hidden_dim, num_experts, recipe, dtype, device)

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
        order, inverse, counts = ops.sort_by_expert(experts_TK.reshape(-1).to(torch.int32), self.num_experts)
        if ranks is None:
            y_TD = self._on_one_device(x_TD, probs_TK, order, inverse, counts)
        else:
            y_TD, counts = self._across_ranks(x_TD, probs_TK, order, inverse, counts, ranks)
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
        """Probabilities and experts (T, K) of each token's choice, and the scores (T, E) as probabilities.

        Of equal scores the lower expert comes first."""
        router = replicated(self.router.weight, self.experts.expert_parallel)
        kind = "cpu" if x_TD.is_meta else x_TD.device.type  # meta has no autocast
        with torch.autocast(kind, enabled=False):
            logits_TE = F.linear(x_TD.float(), router.float())
        scores_TE = logits_TE.softmax(-1) if self.score_func == "softmax" else logits_TE.sigmoid()
        # A stable sort: topk leaves open which of equal scores it takes, and JAX takes the lower expert.
        sorted_TE, experts_TE = scores_TE.sort(dim=-1, descending=True, stable=True)
        chosen_TK, experts_TK = sorted_TE[:, : self.top_k], experts_TE[:, : self.top_k]
        if self.normalize:
            chosen_TK = _shares(chosen_TK)
        return chosen_TK, experts_TK, _shares(scores_TE)

    def _on_one_device(self, x_TD: Tensor, probs_TK: Tensor, order: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
        recipe, tokens = self.experts.recipe, [x_TD.shape[0]]
        maps = RowMaps(*ops.row_map(counts, order.shape[0], self.num_experts, recipe.alignment))
        # Both maps at once: the slot that each padded row fills, -1 for padding, and the row of each slot.
        order_P = torch.cat([order, order.new_full((1,), -1)])[maps.row_map]
        rows = maps.inverse[inverse]
        x = x_TD.to(torch.bfloat16)
        if recipe.mx:
            # To this process alone, which sends nothing. Copies of a row have the row's bytes.
            x = a2a_dispatch_mxfp8_fwd_hp_bwd(x, tokens, tokens, "", recipe.rounding)
        groups = spread(x, order_P, rows, self.top_k)
        prob_P, probs = (), probs_TK
        if self.prob_in == "swiglu":
            prob_P, probs = (gather(probs_TK.reshape(-1, 1), order_P, rows).squeeze(1),), None
        out = self.experts(groups, maps.padded_counts, *prob_P)
        if recipe.mx:
            out = quantize_gradient(out, int(recipe.rounding))
        return weighted_combine(out, probs, rows.view(-1, self.top_k), order_P, x_TD.dtype)

    def _across_ranks(
        self, x_TD: Tensor, probs_TK: Tensor, order: Tensor, inverse: Tensor, counts: Tensor, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        """y, and the rows of all ranks per expert."""
        rows = TokenCopies(x_TD.to(torch.bfloat16), order, inverse, self.top_k)
        travelling, probs = (), probs_TK
        if self.prob_in == "swiglu":
            travelling, probs = (gather(probs_TK.reshape(-1, 1), order, inverse).squeeze(1),), None
        groups, padded_counts, route = send_rows(rows, counts, self.experts.recipe, ranks, *travelling)
        out = self.experts(groups, padded_counts, *(send_probs(p, route) for p in travelling))
        y_TD = weighted_combine(receive_rows(out, route), probs, inverse.view(-1, self.top_k), order, x_TD.dtype)
        return y_TD, route.counts
