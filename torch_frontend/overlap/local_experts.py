"""What the experts of a rank compute.

FFN, MM --multiply--> rows (P, N)                                  after `dispatch`
        --local_experts--> FFNExperts, MMExperts, and parameters   over memory of peers
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request
from ..exchange.process_groups import check_rows_to_send
from ..ops.checks import check_bias, check_probs
from ..ops.launch import check_devices
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
)
from ..products.grouped_mm import MMBackward, MMCall, MMNeeds, grouped_mm, mm_forward
from ..products.groups import GroupEnds, ends_of
from ..products.products import ProductOptions
from ..products.weights import (
    Cached,
    Weights,
    check_weights,
    format_of,
    values_and_cached,
)


class FFNExperts(NamedTuple):
    """Parameters: w1, w3, w2, b1, b3, b2."""

    call: FFNCall
    cached: tuple[Cached, ...]

    def forward(
        self, x: Tensor, prob: Tensor, group_ends: Tensor, parameters: Sequence[Tensor | None], needs: Sequence[bool],
        out: Tensor | None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        weights: Any = parameters[:3]
        biases = Biases._make(parameters[3:])
        return ffn_forward(self._call(needs), x, weights, prob, biases, self.cached, group_ends, out)

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

    def forward(
        self, x: Tensor, prob: Tensor, group_ends: Tensor, parameters: Sequence[Tensor | None], needs: Sequence[bool],
        out: Tensor | None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        w, bias = parameters
        assert w is not None
        return mm_forward(self._call(needs), x, w, bias, self.cached, group_ends, out)

    def backward(
        self, saved: tuple[Any, ...], dout: Tensor, dtypes: tuple[torch.dtype, ...], needs: Sequence[bool]
    ) -> MMBackward:
        return MMBackward(self._call(needs), saved, dout, dtypes[:2])

    def _call(self, needs: Sequence[bool]) -> MMCall:
        x, _, w, bias = needs
        return self.call._replace(needs=MMNeeds(x, w, bias))


class LocalExperts(NamedTuple):
    """Experts of this rank, their parameters, and the width of their rows."""

    experts: FFNExperts | MMExperts
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

    def local_experts(self, request: Request) -> LocalExperts:
        """Raises unless the experts fit the request."""
        op, x = request.op, _checked(request)
        values, cached, biases = check_ffn_weights(op, "rows", x, self.weights, self.biases, self.options.recipe)
        _check_experts(request, values[0].shape[0])
        inside = request.inside and request.probs is not None
        options = self.options._replace(clear_rest=False)  # no transport reads a row past the last end
        call = ffn_call(op, values, x.device, inside, options)
        return LocalExperts(FFNExperts(call, cached), (*values, *biases), values[2].shape[1])


class MM(NamedTuple):
    """The product of this rank's experts."""

    w: Weights
    bias: Bias
    recipe: Recipe

    def multiply(self, groups: Tensor, group_ends: GroupEnds, prob: Tensor | None) -> Tensor:
        """All groups at once, whole blocks of 32 rows, which have no weights."""
        assert prob is None
        return grouped_mm(groups, self.w, group_ends, recipe=self.recipe, bias=self.bias, pad_token_groups=False)

    def local_experts(self, request: Request) -> LocalExperts:
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
        return LocalExperts(MMExperts(call, cached), (values, bias), width)


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
