"""A complete Mixture-of-Experts layer on the MXFP8 pipeline, with expert parallelism on or off.

x (T, D) --router--> top_k experts and probabilities per token
   |                             |
   '--spread, sorted by expert--> rows (T K, D) --[dispatch]--> experts (SwiGLU) --[combine]--> rows
                                                                                                 |
y (T, D) <-- fp32 sum over K of probability x row <--back to token order-------------------------'

T tokens   D dim   F hidden_dim   E experts   K top_k      suffixes below name the dims
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from . import ops
from ._call import require_tensor
from .autograd import bf16_grouped_mm, mxfp8_grouped_mm
from .ep import combine, dispatch
from .parallel import DEFAULT_RECIPE, local
from .permute import gather_rows, spread_rows

SCORES = ("softmax", "sigmoid")


class MoEStats(NamedTuple):
    """counts (E,) int32: rows that this rank's tokens send to each expert. aux_loss: fp32 scalar,
    E * sum_e(fraction of rows to e * mean probability of e), 1 when balanced (Switch Transformer,
    equation 4). overflow: int32 scalar, rows that did not fit; always 0 here, nothing is dropped."""

    counts: Tensor
    aux_loss: Tensor
    overflow: Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, computed in fp32 and rounded once to gate's dtype."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def _shares(scores: Tensor) -> Tensor:
    """Scores over their sum along the last dim; zeros where every sigmoid has underflowed to zero."""
    return scores / scores.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


class GroupedExperts(nn.Module):
    """SwiGLU experts as 3D parameters: w1, w3 (E, F, D) and w2 (E, D, F); y = w2 (silu(w1 x) * w3 x).

    forward(groups, padded_counts): groups (P, D), rows of each local expert in one padded group, bf16 or
    MXTensor; padded_counts (local experts,) integers. Returns (P, D) bf16. Computes in bf16 or MXFP8.
    """

    expert_parallel: int | None = None
    """Ranks that share the experts, set by MXFP8ExpertParallel, which then also routes the tokens."""

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
        self.recipe = Recipe.parse(recipe)
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim, dtype=dtype, device=device))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for w in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(w, std=w.shape[-1] ** -0.5)

    def forward(self, groups_PD: Tensor, padded_counts: Tensor) -> Tensor:
        ends = torch.cumsum(padded_counts, 0, dtype=torch.int32)
        h_PF = swiglu(self._mm(groups_PD, self.w1, ends), self._mm(groups_PD, self.w3, ends))
        return self._mm(h_PF, self.w2, ends)

    def _mm(self, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        w_t = local(w).to(torch.bfloat16).transpose(-2, -1)
        if not self.recipe.quantized:
            return bf16_grouped_mm(x, w_t, ends)
        recipe = self.recipe
        return mxfp8_grouped_mm(
            x, w_t, ends, wgrad_with_hp=recipe.wgrad_with_hp, scale_calculation_mode=recipe.rounding
        )


class MoE(nn.Module):
    """Mixture of SwiGLU experts with top-k routing.

    dim, hidden_dim: multiples of 32. score_func: "softmax" over all experts or "sigmoid" of each, in
    fp32. normalize: divide the top_k scores of a token by their sum. recipe: a Recipe or one of
    "mxfp8_wgrad_with_hp", "mxfp8", "bf16". dtype: of the parameters; experts compute in bf16 or MXFP8.

    forward(x): x (..., D) bfloat16 or float32 -> (y like x, MoEStats). For expert parallelism:
    `parallelize_module(moe.experts, mesh, MXFP8ExpertParallel())`; x is then this rank's tokens.

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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("dim", dim), ("hidden_dim", hidden_dim)):
            if size <= 0 or size % BLOCK:
                fail(ValueError, "MoE", name, size, f"allowed: positive multiples of {BLOCK}")
        if not 1 <= top_k <= num_experts:
            fail(ValueError, "MoE", "top_k", top_k, f"allowed: 1 to num_experts = {num_experts}")
        if score_func not in SCORES:
            fail(ValueError, "MoE", "score_func", repr(score_func), f"allowed: {' or '.join(map(repr, SCORES))}")
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.normalize = score_func, normalize
        self.router = nn.Linear(dim, num_experts, bias=False, dtype=dtype, device=device)
        self.experts = GroupedExperts(dim, hidden_dim, num_experts, recipe, dtype, device)

    def forward(self, x: Tensor) -> tuple[Tensor, MoEStats]:
        require_tensor("MoE", "x", x)
        if x.dtype not in (torch.bfloat16, torch.float32):
            fail(TypeError, "MoE", "x", f"dtype {x.dtype}", "allowed: bfloat16 or float32")
        dim = self.router.in_features
        if x.dim() < 1 or x.shape[-1] != dim:
            fail(ValueError, "MoE", "x", f"shape {tuple(x.shape)}", f"allowed: (..., {dim})")
        x_TD = x.reshape(-1, dim)
        probs_TK, experts_TK, scores_TE = self._route(x_TD)
        order, inverse, counts = ops.sort_by_expert(experts_TK.reshape(-1).to(torch.int32), self.num_experts)
        rows = spread_rows(x_TD.to(torch.bfloat16), order, inverse, self.top_k)
        rows = self._run_experts(rows, counts)
        y_TKD = gather_rows(rows, inverse, order).view(-1, self.top_k, dim)
        y = (y_TKD.float() * probs_TK.unsqueeze(-1)).sum(1).to(x.dtype).view(x.shape)
        fraction_E = counts.float() / max(experts_TK.numel(), 1)
        mean_prob_E = scores_TE.sum(0) / max(x_TD.shape[0], 1)
        aux_loss = self.num_experts * (fraction_E * mean_prob_E).sum()
        return y, MoEStats(counts, aux_loss, counts.new_zeros(()))

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities and experts (T, K) of each token's choice, and the scores (T, E) as probabilities.

        Of equal scores the lower expert comes first."""
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.float(), self.router.weight.float())
        scores_TE = logits_TE.softmax(-1) if self.score_func == "softmax" else logits_TE.sigmoid()
        # A stable sort: topk leaves open which of equal scores it takes, and JAX takes the lower expert.
        sorted_TE, experts_TE = scores_TE.sort(dim=-1, descending=True, stable=True)
        chosen_TK, experts_TK = sorted_TE[:, : self.top_k], experts_TE[:, : self.top_k]
        if self.normalize:
            chosen_TK = _shares(chosen_TK)
        return chosen_TK, experts_TK, _shares(scores_TE)

    def _run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.experts.expert_parallel is not None:
            return self.experts(rows, counts)
        groups, padded_counts, route = dispatch(rows, counts, self.experts.recipe)
        return combine(self.experts(groups, padded_counts), route)
