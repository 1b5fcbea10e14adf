"""Products and feed-forwards of experts on several ranks, as one function each: the exchanges run beside the products.

    expert_parallel_mm     rows (M, K)  --> out (M, N), row i multiplied by the matrix of its expert, wherever it is
    expert_parallel_ffn    rows or TokenReplicas --> the experts' SwiGLU feed-forward

overlap.py has the schedule. The bytes are those of `dispatch`, `grouped_mm` or `grouped_swiglu_ffn`, and `combine`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core_kernels.exchange import Chunk
from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from ..core_kernels.swiglu.activation import PLAIN, SwiGLU
from ._checks import check_bias
from ._counts import checked_rows, counts_of_ranks, shared_arguments
from ._launch import at_address, check_devices
from ._ranks import can_compare, check_rows_to_send, compare_calls, degree_of, name_of
from ._torch_private import group_named
from .combine import combine
from .dispatch import dispatch_over, dispatch_probs
from .ep import TokenReplicas
from .ffn import (
    Bias,
    FFNBackward,
    FFNCall,
    check_ffn_weights,
    ffn_call,
    ffn_forward,
    grouped_swiglu_ffn,
    weight_operands,
)
from .grouped_mm import MMBackward, MMCall, grouped_mm, mm_forward
from .overlap import Experts, Overlap, overlapped
from .peer_exchange import PeerCall, exchanged, lay_out, legs, maps_of
from .peer_memory import Carrier, PeerMemory, check_prob_in_of_peers, described
from .products import ProductOptions
from .shards import Ranks
from .transport import Collectives
from .weights import Held, Weights, check_weights, for_call, form_of, outlives_forward, values_and_held

NO_MORE: Mapping[str, Any] = {}
"""No further arguments that all ranks share."""


class FFNExperts(NamedTuple):
    """Parameters: w1, w3, w2, b1, b3, b2."""

    call: FFNCall
    held: tuple[Held, ...]

    def quantized(self, parameters: Sequence[Tensor | None], needs: Sequence[bool]) -> "FFNExperts":
        weights: Any = parameters[:3]
        if self.call.options.form == "bf16":
            return self
        held: Any = tuple(weight_operands(self._call(needs), weights, self.held))
        return self._replace(held=held)

    def forward(
        self, chunk: Chunk, x: Tensor, prob: Tensor, group_ends: Tensor, parameters: Sequence[Tensor | None],
        needs: Sequence[bool], out: Tensor | None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        weights: Any = parameters[:3]
        held = [_of_chunk(h, chunk) for h in self.held]
        return ffn_forward(self._call(needs), x, weights, prob, parameters[3:], held, group_ends, out)

    def backward(
        self, saved: tuple[Any, ...], dout: Tensor, dtypes: tuple[torch.dtype, ...], needs: Sequence[bool]
    ) -> "_FFNGradients":
        return _FFNGradients(FFNBackward(self._call(needs), saved, dout, dtypes[:4]))

    def _call(self, needs: Sequence[bool]) -> FFNCall:
        x, prob, w1, w3, w2, b1, b3, b2 = needs
        return self.call._replace(needs=(x, w1, w3, w2, prob, b1, b3, b2))


class _FFNGradients(NamedTuple):
    of: FFNBackward

    def inputs(self, out: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return self.of.inputs(out)

    def weights(self, out: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        dw2, db2 = self.of.down(out[2])
        dw1, dw3, db1, db3 = self.of.gate_and_up(out[:2])
        return dw1, dw3, dw2, db1, db3, db2


class MMExperts(NamedTuple):
    """Parameters: w, bias."""

    call: MMCall
    held: Held

    def quantized(self, parameters: Sequence[Tensor | None], needs: Sequence[bool]) -> "MMExperts":
        w, (form, rounding, *_) = parameters[0], self.call.options
        assert w is not None
        if form == "bf16":
            return self
        held: Any = for_call(w, self.held, form, rounding, needs[0] and outlives_forward(w))
        return self._replace(held=held)

    def forward(
        self, chunk: Chunk, x: Tensor, prob: Tensor, group_ends: Tensor, parameters: Sequence[Tensor | None],
        needs: Sequence[bool], out: Tensor | None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        w, bias = parameters
        assert w is not None
        return mm_forward(self._call(needs), x, w, bias, _of_chunk(self.held, chunk), group_ends, out)

    def backward(
        self, saved: tuple[Any, ...], dout: Tensor, dtypes: tuple[torch.dtype, ...], needs: Sequence[bool]
    ) -> "_MMGradients":
        return _MMGradients(MMBackward(self._call(needs), saved, dout, dtypes[:2]))

    def _call(self, needs: Sequence[bool]) -> MMCall:
        x, _, w, bias = needs
        return self.call._replace(needs=(x, w, bias))


class _MMGradients(NamedTuple):
    of: MMBackward

    def inputs(self, out: Tensor | None) -> tuple[Tensor | None, None]:
        return self.of.inputs(out), None

    def weights(self, out: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return self.of.weights(out[0])


def _of_chunk(held: Held, chunk: Chunk) -> Held:
    """The operands of a chunk's experts."""
    if held is None:
        return None
    cut = lambda part: at_address(part[chunk.first : chunk.last])  # noqa: E731
    return tuple(None if x is None else type(x)(*map(cut, x)) for x in held)  # type: ignore[return-value]


class FFNWeights(NamedTuple):
    """The experts of this rank: w1, w3, w2 and b1, b3, b2, their activation, whether quantized weights may live until
    the backward, and whether it multiplies gate and up again."""

    weights: Sequence[Weights]
    biases: Sequence[Bias]
    activation: SwiGLU
    save_bytes: bool
    recompute: bool = False


def ffn_over(
    op: str, rows: Tensor | TokenReplicas, counts: Tensor, of: FFNWeights, probs: Tensor | None, prob_in: str,
    out_dtype: torch.dtype, recipe: Recipe, ranks: Ranks, transport: Carrier, also: Mapping[str, Any] = NO_MORE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`expert_parallel_ffn` over the ranks of a layer, at least two. also: as in `dispatch_over`. Returns the result
    and (E,) rows of all ranks per expert."""
    error, inside = None, probs is not None and prob_in == "swiglu"
    experts, parameters, width = None, (), 0
    try:
        x = _checked(op, rows, recipe, probs)
        values, held, biases = check_ffn_weights(op, "rows", x, of.weights, of.biases, recipe)
        _check_experts(op, counts, values[0].shape[0], ranks)
        if isinstance(transport, PeerMemory) and probs is not None:
            check_prob_in_of_peers(op, "prob_in", prob_in)
        call = ffn_call(op, values, recipe, x.device, of.activation, False, inside, of.save_bytes, of.recompute)
        experts, parameters, width = FFNExperts(call, held), (*values, *biases), values[2].shape[1]
    except (TypeError, ValueError) as found:
        error = found
    options = width, out_dtype, recipe, ranks, transport, also, error
    return _run_eagerly(rows, counts, probs, inside, experts, parameters, *options)


def mm_over(
    op: str, rows: Tensor | TokenReplicas, counts: Tensor, w: Weights, bias: Bias, out_dtype: torch.dtype,
    recipe: Recipe, ranks: Ranks, transport: Carrier,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`expert_parallel_mm`, as `ffn_over`."""
    error, experts, parameters, width = None, None, (), 0
    try:
        x = _checked(op, rows, recipe, None)
        check_weights(op, "w", w, form_of(recipe, x.device), recipe.rounding)
        values, held = values_and_held(w)
        groups, width, k = values.shape
        if x.shape[1] != k or k % BLOCK or width % BLOCK or not values.is_contiguous():
            got = f"shape {tuple(values.shape)}, strides {values.stride()}"
            allowed = f"allowed: a contiguous (G, N, {x.shape[1]}), N and K multiples of {BLOCK}"
            fail(ValueError, op, "w", got, allowed)
        check_devices(op, "rows", x.device, w=values)
        _check_experts(op, counts, groups, ranks)
        bias = None if bias is None else check_bias(op, "bias", bias, groups, width, x.device)
        need_wgrad = torch.is_grad_enabled() and values.requires_grad
        call = MMCall(ProductOptions.of(recipe, x.device, False, need_wgrad), torch.bfloat16)
        experts, parameters = MMExperts(call, held), (values, bias)
    except (TypeError, ValueError) as found:
        error = found
    options = width, out_dtype, recipe, ranks, transport, NO_MORE, error
    return _run_eagerly(rows, counts, None, False, experts, parameters, *options)


def _run(
    rows: Tensor | TokenReplicas, counts: Tensor, probs: Tensor | None, inside: bool, experts: Experts | None,
    parameters: Sequence[Tensor | None], width: int, out_dtype: torch.dtype, recipe: Recipe, ranks: Ranks,
    transport: Carrier, also: Mapping[str, Any], error: Exception | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    also = {**also, "transport": described(transport), "weights inside": inside}
    if isinstance(transport, PeerMemory):
        options = width, out_dtype, recipe, ranks, transport, also, error
        return _run_over_peers(rows, counts, probs, inside, experts, parameters, *options)
    of_ranks = counts_of_ranks(rows, counts, recipe, ranks, probs, error, also)
    assert experts is not None
    rank, replicas = group_named(ranks.group_name).rank(), of_ranks.rows
    if isinstance(replicas, TokenReplicas):
        x, maps = replicas.x, (replicas.order, replicas.inverse, replicas.top_k)
    else:
        x, maps = replicas, (None, None, 0)
    call = Overlap(transport, rank, of_ranks.table, recipe, experts, width, out_dtype, *maps, inside)
    return overlapped(x, probs, call, *parameters), of_ranks.agreed.totals


def _run_over_peers(
    rows: Tensor | TokenReplicas, counts: Tensor, probs: Tensor | None, inside: bool, experts: Experts | None,
    parameters: Sequence[Tensor | None], width: int, out_dtype: torch.dtype, recipe: Recipe, ranks: Ranks,
    memory: PeerMemory, also: Mapping[str, Any], error: Exception | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    op, num_rows, shared = "dispatch", 0, {}
    try:
        if error is None:
            rows, num_rows = checked_rows(rows, counts, recipe, ranks, probs)
            check_devices(op, "transport", memory.device, rows=maps_of(rows)[0])
            also = {"experts": counts.shape[0], **also}
            shared = shared_arguments(rows, recipe, ranks, probs, also)
    except (TypeError, ValueError) as found:
        error = found
    if error is not None:
        memory.interrupt()
        if memory.room is None and can_compare(ranks.group_name):
            compare_calls(op, shared, ranks.group_name, error)  # the others do before they allocate, and raise too
        raise error
    assert experts is not None
    x, inverse, top_k = maps_of(rows)
    parts = legs(recipe, x.shape[1], x.dtype, width)
    with torch.no_grad(), memory.uninterrupted():
        capacity = memory.reserve(op, num_rows, counts.shape[0], recipe.alignment, parts, shared)
        layout = lay_out(memory, counts, num_rows, capacity, recipe.alignment)
    call = PeerCall(memory, layout, recipe, experts, width, out_dtype, inverse, top_k, inside)
    return exchanged(x, probs, call, *parameters), layout.totals


# The host reads the counts, and which rows travel depends on them.
_run_eagerly: Callable[..., Any] = torch.compiler.disable(_run)


def _checked(op: str, rows: Tensor | TokenReplicas, recipe: Recipe, probs: Tensor | None) -> Tensor:
    """The tensor of the rows; raises unless it can be sent and probs weight a sum over replicas."""
    x = rows.x if isinstance(rows, TokenReplicas) else rows
    check_rows_to_send(op, "rows", x, recipe.mx or bool(recipe.mx_legs))
    if probs is not None and not isinstance(rows, TokenReplicas):
        fail(ValueError, op, "probs", "a tensor", "allowed: None for rows; probs weight the replicas of TokenReplicas")
    return x


def _check_experts(op: str, counts: Tensor, groups: int, ranks: Ranks) -> None:
    if isinstance(counts, Tensor) and counts.shape != (groups * ranks.degree,):
        allowed = f"allowed: ({groups * ranks.degree},), the {groups} experts of each of {ranks.degree} ranks"
        fail(ValueError, op, "counts", f"shape {tuple(counts.shape)}", allowed)


def expert_parallel_mm(
    rows: Tensor | TokenReplicas,
    w: Weights,
    counts: Tensor,
    *,
    recipe: Recipe | str = "mxfp8",
    bias: Tensor | None = None,
    group: "str | dist.ProcessGroup | None" = None,
    transport: Carrier | None = None,
) -> Tensor:
    """Multiply each row by the matrix of its expert, on the expert's rank; differentiable in rows, w and bias.

    rows, counts, recipe, group: as in `dispatch`. w (G, N, K), bias: of this rank's experts, as in `grouped_mm`.
    transport: how rows travel; None is `Collectives` of the group.

    Returns (M, N) bfloat16, or of TokenReplicas (T, N), the sum over each token's replicas. The bytes of the result and
    of all gradients are those of `dispatch`, `grouped_mm` and `combine`, and the exchanges run beside the products. The
    host waits for the counts alone, over `PeerMemory` for nothing. All ranks need a gradient of the rows, or none does.

    >>> w = torch.stack([torch.eye(32), 2 * torch.eye(32)])
    >>> expert_parallel_mm(torch.ones(3, 32), w, torch.tensor([1, 2]))[:, 0].tolist()
    [1.0, 2.0, 2.0]

    Raises TypeError and ValueError. An error on one rank raises on all ranks, and no row is sent.
    """
    op, recipe = "expert_parallel_mm", Recipe.parse(recipe)
    ranks = _ranks_of(op, group)
    if ranks.degree == 1:
        groups, _, route = dispatch_over(rows, counts, recipe, None)
        out = grouped_mm(groups, w, route, recipe=recipe, bias=bias, pad_token_groups=False)
        return combine(out, route)
    transport = transport or Collectives(ranks.group_name)
    return mm_over(op, rows, counts, w, bias, torch.bfloat16, recipe, ranks, transport)[0]


def expert_parallel_ffn(
    rows: Tensor | TokenReplicas,
    counts: Tensor,
    w1: Weights,
    w3: Weights,
    w2: Weights,
    probs: Tensor | None = None,
    *,
    prob_in: Literal["combine", "swiglu"] = "swiglu",
    b1: Tensor | None = None,
    b3: Tensor | None = None,
    b2: Tensor | None = None,
    activation: SwiGLU = PLAIN,
    recipe: Recipe | str = "mxfp8",
    group: "str | dist.ProcessGroup | None" = None,
    transport: Carrier | None = None,
) -> Tensor:
    """The SwiGLU feed-forward of experts on the ranks of a group; differentiable in rows, weights, biases and probs.

    rows, counts, recipe, group: as in `dispatch`.
    w1, w3 (G, F, D), w2 (G, D, F), b1, b3, b2, activation: of this rank's experts, as in `grouped_swiglu_ffn`.
    probs: of TokenReplicas, (T, top_k) float32. prob_in: the place where it weights a row: "combine" or "swiglu", as
        in `MoE`.
    transport: how rows travel; None is `Collectives` of the group.

    Returns (M, D) rows, or of TokenReplicas (T, D), bfloat16. The bytes of the result and of all gradients are those of
    `dispatch`, `grouped_swiglu_ffn` and `combine`. The host waits for the counts alone, over `PeerMemory` for
    nothing; that takes no prob_in="combine". All ranks need a gradient of the rows, or none does.

    >>> w = torch.full((1, 32, 32), 1 / 32)
    >>> expert_parallel_ffn(torch.ones(1, 32), torch.tensor([1]), w, w, w)[0, 0].item()  # as grouped_swiglu_ffn's
    0.75

    Raises TypeError and ValueError. An error on one rank raises on all ranks, and no row is sent.
    """
    op, recipe = "expert_parallel_ffn", Recipe.parse(recipe)
    ranks = _ranks_of(op, group)
    if prob_in not in ("combine", "swiglu"):
        fail(ValueError, op, "prob_in", repr(prob_in), "allowed: 'combine' or 'swiglu'")
    if ranks.degree == 1:
        groups, _, route = dispatch_over(rows, counts, recipe, None, probs)
        inside = probs is not None and prob_in == "swiglu"
        prob = dispatch_probs(probs, route) if probs is not None and inside else None
        biases: dict[str, Any] = {"b1": b1, "b3": b3, "b2": b2}
        options: dict[str, Any] = {"activation": activation, "recipe": recipe, "pad_token_groups": False}
        out = grouped_swiglu_ffn(groups, w1, w3, w2, route, prob, **biases, **options)
        return combine(out, route, None if inside else probs)
    weights = w1, w3, w2
    save_bytes = all(not isinstance(w, Tensor) or outlives_forward(w) for w in weights)
    of, transport = (
        FFNWeights(weights, (b1, b3, b2), activation, save_bytes),
        transport or Collectives(ranks.group_name),
    )
    return ffn_over(op, rows, counts, of, probs, prob_in, torch.bfloat16, recipe, ranks, transport)[0]


def _ranks_of(op: str, group: "str | dist.ProcessGroup | None") -> Ranks:
    name = name_of(op, "group", group)
    return Ranks(name, degree_of(name), 0, "")
