"""The experts of a layer as parameters: this rank's part of them, quantized once or in every call.

groups (P, D), layout --forward--> (P, D)       the layout of a `dispatch` says how: at once, or during an exchange
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.swiglu.activation import PLAIN, SwiGLU
from ..exchange.exchange import Exchange, Layout, Local
from ..exchange.shards import Ranks, check_sharded, replicated, sharded
from ..ops.checks import (
    check_autocast,
    check_counts,
    check_flag,
    check_floats,
    check_int,
    check_probs,
    check_shape,
    reads_values,
    require_rows,
)
from ..overlap.local_experts import FFN
from ..products.ffn import Biases, FFNOptions, swiglu_ffn
from ..products.weights import Weights, outlives_forward
from .cached_weights import CachedWeights, opened, without_blocks
from .quantized_gather import QuantizedGather


class GroupedExperts(nn.Module):
    """SwiGLU experts as 3D parameters: w1, w3 (E, F, D) and w2 (E, D, F); y = w2 (silu(w1 x) * w3 x).

    Args:
        dim: D, a positive multiple of 32.
        hidden_dim: F, a positive multiple of 32.
        num_experts: E.
        recipe: A Recipe or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".
        dtype: Of the parameters.
        device: Of the parameters.
        bias: Add b1, b3 (E, F) and b2 (E, D), zeros at first, to the three products.
        activation: A `SwiGLU`.
        recompute: The forward saves its rows and nothing else, MXFP8 bytes if `dispatch` quantized them. The backward
            quantizes the weights and multiplies w1 and w3 again. The gradients are the same bytes.

    Raises:
        ValueError: For sizes, recipes and counts that are not allowed.
        TypeError: For values of another type.

    The forward is `experts(groups, padded_counts, probs=None)`. Under `ExpertParallel` the groups are from `dispatch`
    on this rank.

    - groups: (P, D) bfloat16 or MXTensor, one padded group per local expert.
    - padded_counts: (local experts,) of an integer dtype, multiples of 32; or the RowMap that laid the groups out, or
      another layout of a `dispatch`.
    - probs: (P,) float32, a weight for each row of the result; or None.
    - It returns (P, D) bfloat16.

    Example:
        >>> experts = GroupedExperts(32, 64, num_experts=2)
        >>> experts(torch.ones(64, 32), torch.tensor([32, 32])).shape
        torch.Size([64, 32])
    """

    expert_parallel: Ranks | None = None
    """The ranks that share the experts, set by ExpertParallel; None is this process alone."""
    exchange: Exchange = Local()
    """How their layer exchanges rows, set by ExpertParallel."""
    quantized_gather: QuantizedGather | None = None
    """How FSDP2 gathers the weights, set by shard_moe; None is as values."""

    b1: Tensor | None
    b2: Tensor | None
    b3: Tensor | None
    _held: CachedWeights | None = None
    """Of the innermost open block of `cached_weights`."""
    _blocks: tuple[CachedWeights, ...] = ()
    """Of all open blocks, in the order in which they began."""

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
        recompute: bool = False,
    ) -> None:
        super().__init__()
        check_sizes("GroupedExperts", {"dim": dim, "hidden_dim": hidden_dim}, {"num_experts": num_experts})
        check_flag("GroupedExperts", "bias", bias)
        check_flag("GroupedExperts", "recompute", recompute)
        self.recompute = recompute
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
            # Before torch 2.13 `trunc_normal_` makes one of 512 bf16 weights +-2: the ends of a uniform bf16 number.
            nn.init.normal_(w, std=w.shape[-1] ** -0.5)
        for b in (self.b1, self.b2, self.b3):
            if b is not None:
                nn.init.zeros_(b)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "GroupedExperts":
        super()._apply(fn, recurse)
        if self.quantized_gather is not None:
            self.quantized_gather.attach(self)
        return self

    def extra_repr(self) -> str:
        (e, f, d), bias = self.w1.shape, self.b1 is not None
        sizes = f"dim={d}, hidden_dim={f}, num_experts={e}, recipe={self.recipe.name!r}, bias={bias}"
        return f"{sizes}, activation={self.activation}"

    def forward(self, groups_PD: Tensor, padded_counts: Tensor | Layout, probs_P: Tensor | None = None) -> Tensor:
        """Multiply each group by its expert.

        Args:
            groups_PD: (P, D) bfloat16, float32 or an MXTensor, one padded group per local expert.
            padded_counts: (local experts,) of an integer dtype, multiples of 32; or the RowMap that laid the groups
                out, or another layout of a `dispatch`.
            probs_P: (P,) float32, a weight for each row of the result; or None.

        Returns:
            (P, D) bfloat16.

        Raises:
            ValueError: shapes, counts that do not fit.
            TypeError: dtypes.

        Example:
            >>> experts = GroupedExperts(32, 64, num_experts=2)
            >>> experts(torch.ones(64, 32), torch.tensor([32, 32])).shape
            torch.Size([64, 32])
        """
        of = self._local()
        if not isinstance(padded_counts, Tensor) and hasattr(padded_counts, "run"):
            return padded_counts.run(of, groups_PD, probs_P)
        self._check_groups(of.op, groups_PD, padded_counts, probs_P, of.weights[0])  # type: ignore[arg-type]
        return of.multiply(groups_PD, torch.cumsum(padded_counts, 0, dtype=torch.int32), probs_P)  # type: ignore[arg-type]

    def _check_groups(
        self, op: str, groups_PD: Tensor, padded_counts: Tensor, probs_P: Tensor | None, w1: Weights
    ) -> None:
        check_floats(op, "groups_PD", groups_PD)
        check_autocast(op, groups_PD)
        check_shape(op, "groups_PD", groups_PD, ("P", w1.shape[2]))
        check_counts(op, "padded_counts", padded_counts, groups_PD.device)
        check_shape(op, "padded_counts", padded_counts, (w1.shape[0],))
        if reads_values(padded_counts):
            require_rows(op, "padded_counts", padded_counts, groups_PD.shape[0])
        if self.recipe.wgrad_mx and torch.is_grad_enabled():
            self._check_blocks(op, groups_PD.shape[0], padded_counts)
        if probs_P is not None:
            check_probs(op, "probs_P", probs_P, groups_PD.shape[:1], groups_PD.device)

    def _of_other_shape(self, parts: tuple[Tensor, ...]) -> list[tuple[str, Tensor, tuple[int, ...]]]:
        """The parts of w1, w3 and w2 that are not all of this rank's experts: their names and the shapes of all."""
        degree = self.expert_parallel.degree if self.expert_parallel else 1
        wholes = [(self.num_experts // degree, *w.shape[1:]) for w in (self.w1, self.w3, self.w2)]
        found = zip(("w1", "w3", "w2"), parts, wholes, strict=True)
        return [(name, part, whole) for name, part, whole in found if part.shape != whole]

    def _local(self) -> FFN:
        """The experts of this rank, with quantized weights if they are cached. Called in `forward` alone: the
        parameters may be other ones before, since forward hooks assign or gather them."""
        parameters = self.w1, self.w3, self.w2
        check_sharded("GroupedExperts", parameters, self.expert_parallel)
        weights: tuple[Any, ...] = tuple(sharded(w, self.expert_parallel) for w in parameters)
        if self.quantized_gather is not None:
            self.quantized_gather.require(self, weights)
        elif self._held is not None:
            weights = self._held.weights_of(parameters, weights)
        b1, b3, b2 = (b if b is None else sharded(b, self.expert_parallel) for b in (self.b1, self.b3, self.b2))
        return FFN("GroupedExperts.forward", weights, Biases(b1, b3, b2), self._options(pad=False))

    def _options(self, pad: bool) -> FFNOptions:
        """pad: groups may end within a block of tokens."""
        save_bytes = all(outlives_forward(w) for w in (self.w1, self.w3, self.w2))
        return FFNOptions(self.recipe, self.activation, pad, save_bytes, self.recompute)

    def _check_blocks(self, op: str, rows: int, padded_counts: Tensor) -> None:
        """Raise unless every group is whole blocks of 32 tokens, along which the weight gradient quantizes."""
        allowed = f"allowed: multiples of {BLOCK}, as `dispatch` returns them"
        if rows % BLOCK:
            fail(ValueError, op, "groups_PD", f"P = {rows}", allowed)
        if reads_values(padded_counts) and (padded_counts % BLOCK).any():
            fail(ValueError, op, "padded_counts", padded_counts.tolist(), allowed)

    @contextmanager
    def cached_weights(self) -> Iterator[None]:
        """Quantize the weights once, at the beginning of the block, instead of in every call.

        For microbatches of one optimizer step, evaluation and serving. The bytes take 2.06 bytes per weight, 4 for
        exact products on Hopper. The block holds for calls of all threads. Several blocks may be open and end in any
        order. A deep copy and a saved layer are outside of the block.

        Returns:
            A context manager.

        Raises:
            ValueError: For weights that FSDP2 has sharded and gathers as values in every call, and for unsharded ones
                with `quantized_gather`, whose shards the block quantizes. docs/guides/fsdp.md keeps values gathered for
                several calls.
            RuntimeError: In calls and at the end of the block, if a version counter shows a write to a weight. Version
                counters do not count writes through `.data`, by collectives or by other processes. Weights that were
                made in `inference_mode` have none.

        Example:
            >>> experts = GroupedExperts(32, 64, num_experts=2)
            >>> with experts.cached_weights():
            ...     y = experts(torch.ones(64, 32), torch.tensor([32, 32]))
        """
        parameters = {"w1": self.w1, "w3": self.w3, "w2": self.w2}
        if self.quantized_gather is not None:
            cached = self.quantized_gather.cached(parameters)
            with opened(self, cached):
                yield
            return cached.check(tuple(parameters.values()))
        parts = tuple(sharded(w, None) for w in parameters.values())
        for name, part, whole in self._of_other_shape(parts):
            got, allowed = f"a shard {tuple(part.shape)}", f"allowed: {whole}, all of this rank's experts"
            hint = "under FSDP2 call `unshard()` before"
            fail(ValueError, "cached_weights", name, got, allowed, hint=hint)
        cached = CachedWeights.of(parameters, parts, self.recipe)
        with opened(self, cached):
            yield
        cached.check((self.w1, self.w3, self.w2))

    def __getstate__(self) -> dict[str, Any]:
        return without_blocks(self)


class SharedFFN(GroupedExperts):
    """The shared expert of a layer: `GroupedExperts` of one expert, without biases.

    `shared(x)` takes x (T, D) bfloat16 and returns (T, D) bfloat16. Under `ExpertParallel` every rank has all of its
    weights, and the backward sums their gradients over the ranks.
    """

    all_ranks: Ranks | None = None
    """The ranks that have this expert, set by ExpertParallel; None is this process alone."""

    def forward(self, x_TD: Tensor) -> Tensor:  # type: ignore[override]
        parameters = self.w1, self.w3, self.w2
        weights: tuple[Any, ...] = tuple(replicated(w, self.all_ranks) for w in parameters)
        if self._held is not None:
            weights = self._held.weights_of(parameters, weights)
        tokens = x_TD.shape[0]
        ends = torch.full((1,), tokens, dtype=torch.int32, device=x_TD.device)
        return swiglu_ffn("MoE", x_TD, weights, ends, None, Biases(), self._options(pad=tokens % BLOCK != 0))


def check_sizes(op: str, blocks: dict[str, int], others: dict[str, int]) -> None:
    """Raise unless all are positive ints, the first ones multiples of 32."""
    for name, size in (blocks | others).items():
        check_int(op, name, size, 1)
    for name, size in blocks.items():
        if size % BLOCK:
            fail(ValueError, op, name, size, f"allowed: positive multiples of {BLOCK}")
