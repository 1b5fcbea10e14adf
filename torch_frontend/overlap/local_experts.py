"""What the experts of a rank compute, for all groups at once or a chunk of groups at a time.

FFN, MM --multiply--> rows (P, N)                                  after `dispatch`
        --in_chunks--> FFNExperts, MMExperts, and parameters       for the schedule of schedule.py
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.exchange import Chunk
from ...core_kernels.policy.recipe import Recipe
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request
from ..exchange.process_groups import check_rows_to_send
from ..ops.checks import check_bias, check_probs
from ..ops.launch import at_address, check_devices
from ..products.ffn import (
    Bias,
    Biases,
    FFNBackward,
    FFNCall,
    FFNNeeds,
    FFNOptions,
    check_ffn_weights,
    ffn_call,
    ffn_forward,
    swiglu_ffn,
    weight_operands,
)
from ..products.forms.form import WeightOperands
from ..products.grouped_mm import MMBackward, MMCall, MMNeeds, grouped_mm, mm_forward
from ..products.groups import GroupEnds, ends_of
from ..products.products import ProductOptions
from ..products.weights import (
    Cached,
    Weights,
    check_weights,
    format_of,
    outlives_forward,
    quantize_for_call,
    values_and_cached,
)
from .schedule import Experts


class FFNExperts(NamedTuple):
    """Parameters: w1, w3, w2, b1, b3, b2."""

    call: FFNCall
    cached: tuple[Cached, ...]

    def quantized(self, parameters: Sequence[Tensor | None], needs: Sequence[bool]) -> "FFNExperts":
        weights: Any = parameters[:3]
        if not self.call.options.form.quantizes:
            return self
        cached: Any = tuple(weight_operands(self._call(needs), weights, self.cached))
        return self._replace(cached=cached)

    def forward(
        self, chunk: Chunk, x: Tensor, prob: Tensor, group_ends: Tensor, parameters: Sequence[Tensor | None],
        needs: Sequence[bool], out: Tensor | None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        weights: Any = parameters[:3]
        cached = [_of_chunk(h, chunk) for h in self.cached]
        return ffn_forward(self._call(needs), x, weights, prob, Biases._make(parameters[3:]), cached, group_ends, out)

    def backward(
        self, saved: tuple[Any, ...], dout: Tensor, dtypes: tuple[torch.dtype, ...], needs: Sequence[bool]
    ) -> FFNBackward:
        return FFNBackward(self._call(needs), saved, dout, dtypes[:4])

    def _call(self, needs: Sequence[bool]) -> FFNCall:
        x, prob, w1, w3, w2, b1, b3, b2 = needs
        return self.call._replace(needs=FFNNeeds(x, w1, w3, w2, prob, b1, b3, b2))


class MMExperts(NamedTuple):
    """Parameters: w, bias."""

    call: MMCall
    cached: Cached

    def quantized(self, parameters: Sequence[Tensor | None], needs: Sequence[bool]) -> "MMExperts":
        w, form = parameters[0], self.call.options.form
        assert w is not None
        if not form.quantizes:
            return self
        return self._replace(cached=quantize_for_call(w, self.cached, form, needs[0] and outlives_forward(w)))

    def forward(
        self, chunk: Chunk, x: Tensor, prob: Tensor, group_ends: Tensor, parameters: Sequence[Tensor | None],
        needs: Sequence[bool], out: Tensor | None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        w, bias = parameters
        assert w is not None
        return mm_forward(self._call(needs), x, w, bias, _of_chunk(self.cached, chunk), group_ends, out)

    def backward(
        self, saved: tuple[Any, ...], dout: Tensor, dtypes: tuple[torch.dtype, ...], needs: Sequence[bool]
    ) -> MMBackward:
        return MMBackward(self._call(needs), saved, dout, dtypes[:2])

    def _call(self, needs: Sequence[bool]) -> MMCall:
        x, _, w, bias = needs
        return self.call._replace(needs=MMNeeds(x, w, bias))


def _of_chunk(cached: Cached, chunk: Chunk) -> Cached:
    """The operands of a chunk's experts."""
    if cached is None:
        return None
    cut = lambda part: at_address(part[chunk.first : chunk.last])  # noqa: E731
    return WeightOperands._make(None if x is None else type(x)(*map(cut, x)) for x in cached)


class InChunks(NamedTuple):
    """Experts that are multiplied in chunks, their parameters, and the width of their rows."""

    experts: Experts
    parameters: Sequence[Tensor | None]
    width: int


class FFN(NamedTuple):
    """The feed-forward of this rank's experts.

    op: of errors. weights: w1, w3, w2.
    """

    op: str
    weights: Sequence[Weights]
    biases: Biases
    options: FFNOptions

    def multiply(self, groups: Tensor, group_ends: GroupEnds, prob: Tensor | None) -> Tensor:
        """All groups at once, whole blocks of 32 rows."""
        ends = ends_of(self.op, group_ends, groups)
        return swiglu_ffn(self.op, groups, self.weights, ends, prob, self.biases, self.options)

    def in_chunks(self, request: Request) -> InChunks:
        """Raises unless the experts fit the request."""
        op, x = request.op, _checked(request)
        values, cached, biases = check_ffn_weights(op, "rows", x, self.weights, self.biases, self.options.recipe)
        _check_experts(request, values[0].shape[0])
        inside = request.inside and request.probs is not None
        options = self.options._replace(clear_rest=False)  # no transport reads a row past the last end
        call = ffn_call(op, values, x.device, inside, options)
        return InChunks(FFNExperts(call, cached), (*values, *biases), values[2].shape[1])


class MM(NamedTuple):
    """The product of this rank's experts."""

    w: Weights
    bias: Bias
    recipe: Recipe

    def multiply(self, groups: Tensor, group_ends: GroupEnds, prob: Tensor | None) -> Tensor:
        """All groups at once, whole blocks of 32 rows, which have no weights."""
        assert prob is None
        return grouped_mm(groups, self.w, group_ends, recipe=self.recipe, bias=self.bias, pad_token_groups=False)

    def in_chunks(self, request: Request) -> InChunks:
        """Raises unless the experts fit the request."""
        op, x, (w, bias, recipe) = request.op, _checked(request), self
        check_weights(op, "w", w, format_of(recipe, x.device), recipe.rounding)
        values, cached = values_and_cached(w)
        groups, width, k = values.shape
        if x.shape[1] != k or k % BLOCK or width % BLOCK or not values.is_contiguous():
            got = f"shape {tuple(values.shape)}, strides {values.stride()}"
            allowed = f"allowed: a contiguous (G, N, {x.shape[1]}), N and K multiples of {BLOCK}"
            fail(ValueError, op, "w", got, allowed)
        check_devices(op, "rows", x.device, w=values)
        _check_experts(request, groups)
        bias = None if bias is None else check_bias(op, "bias", bias, groups, width, x.device)
        need_wgrad = torch.is_grad_enabled() and values.requires_grad
        call = MMCall(ProductOptions.of(recipe, x.device, False, need_wgrad), torch.bfloat16)
        return InChunks(MMExperts(call, cached), (values, bias), width)


def _checked(request: Request) -> Tensor:
    """The tensor of the rows; raises unless it can be sent and probs weight a sum over replicas."""
    op, x, recipe = request.op, request.x, request.recipe
    check_rows_to_send(op, "rows", x, recipe.mx or bool(recipe.mxfp8_all_to_all))
    if request.probs is not None:
        if not isinstance(request.rows, TokenReplicas):
            allowed = "allowed: None for rows; probs weight the replicas of TokenReplicas"
            fail(ValueError, op, "probs", "a tensor", allowed)
        check_probs("dispatch", "probs", request.probs, (x.shape[0], request.rows.top_k), x.device)
    return x


def _check_experts(request: Request, groups: int) -> None:
    counts, degree = request.counts, request.ranks.degree
    if isinstance(counts, Tensor) and counts.shape != (groups * degree,):
        allowed = f"allowed: ({groups * degree},), the {groups} experts of each of {degree} ranks"
        fail(ValueError, request.op, "counts", f"shape {tuple(counts.shape)}", allowed)
