"""The router: from tokens to logits, from logits to experts and weights, and the gradients of both steps.

    x (T, D), weight (E, D) --router_logits--> logits (T, E) fp32 --route--> experts, weights (T, k), shares (E,)
                      '---------------------route_tokens-----------------------'
      '-----------------------------------------------------------------------> x, for the experts

    gradient of x from the experts ---.
    gradient of the logits x weight --+--logits_bwd--> gradient of x

`route` reads the logits once, forward and backward. It saves the logits and the experts. `route_tokens` passes the
tokens on to the experts, so that their gradient meets the router's in fp32: `logits_bwd` adds both and rounds once.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.router import RouterConfig, check_router
from ..ops import direct as ops
from ..ops.call import FLOATS, require_tensor
from ..ops.checks import check_counts, check_plain, check_shape, reads_values
from ..ops.differentiable import differentiable
from ..ops.launch import at_address, check_devices


class Routing(NamedTuple):
    """The choice of `route`.

    Args:
        experts: (T, k) int32, the chosen experts of each token, best first.
        weights: (T, k) float32, their weights.
        shares: (E,) float32, the sum over the tokens of each expert's share of the scores. The auxiliary loss needs it.

    Attributes:
        experts: (T, k) int32, the chosen experts of each token, best first.
        weights: (T, k) fp32, their weights.
        shares: (E,) fp32, the sum over the tokens of each expert's share of the scores, which the auxiliary loss needs.
    """

    experts: Tensor
    weights: Tensor
    shares: Tensor


# --- logits ---------------------------------------------------------------------------------------------


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of bf16 operands in fp32. On a GPU neither is cast."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _terms(dlogits: Tensor) -> Tensor:
    """Two bf16 terms of fp32 (T, E), side by side, as `route_bwd` splits it."""
    tokens, experts = dlogits.shape
    terms = torch.empty((tokens, 2 * experts), dtype=torch.bfloat16, device=dlogits.device)
    high, low = terms[:, :experts], terms[:, experts:]
    high.copy_(dlogits)
    torch.sub(dlogits, high, out=low)
    low.nan_to_num_(0, 0, 0)  # of a gradient that bf16 does not hold: infinity less infinity
    return terms


def _logits_bwd(
    ctx: Any, terms: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight, as far as the context needs them. dx: another gradient of x, to add.

    They multiply an fp32 gradient by bf16 operands. Its two bf16 terms hold 16 of its 24 bits, and both products are
    summed in fp32; bf16 results keep 8.
    """
    experts, dweight = weight.shape[0], None
    if ctx.needs_input_grad[0]:
        dx = weight.new_empty(0) if dx is None else at_address(dx.contiguous())
        dx = ops.logits_bwd(terms, at_address(weight.contiguous()), dx)
    if ctx.needs_input_grad[1]:
        of_both = _product(terms.t(), x)
        dweight = torch.add(of_both[:experts], of_both[experts:], out=torch.empty_like(weight))
    return dx, dweight


class _Logits(torch.autograd.Function):
    """The product of bf16 x and weight in fp32; x is saved as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return _logits_bwd(ctx, _terms(grads[0]), x, weight)


_logits = differentiable("router_logits", _Logits)


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (T, D) @ weight (E, D)^T + bias (E,) in fp32, also under autocast; for checked arguments.

    bf16 operands are multiplied as they are; others are cast to fp32.
    """
    if _autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return router_logits(x, weight, bias)
    logits = _logits(x, weight) if x.dtype == weight.dtype == torch.bfloat16 else F.linear(x.float(), weight.float())
    return logits if bias is None else logits + bias.float()


def _autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # meta has no autocast


# --- the choice -------------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """`RouterConfig.options`. Dynamo makes it again of numbers that it traces, which a RouterConfig would refuse."""

    top_k: int
    score_func: str
    normalize: bool
    route_scale: float
    num_groups: int
    top_k_groups: int
    group_score: str
    force_balance: bool


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor, router: _Choice) -> tuple[Tensor, Tensor, Tensor]:
        logits = logits.contiguous()
        routing = _chosen(ctx, logits, bias, router)
        ctx.save_for_backward(logits, routing[0])
        return routing

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        logits, experts = ctx.saved_tensors
        return _choice_bwd(ctx, grads, logits, experts, False), None, None


class _Router(torch.autograd.Function):
    """x for the experts, logits of bf16 x and weight, and the choice, in one function: less work of the host, and one
    rounding of the gradient of x. logit_bias: (E,), or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, logit_bias: Tensor | None, bias: Tensor, router: _Choice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, of_experts = _product(x, weight.t()), x.view_as(x)
        if logit_bias is not None:
            logits += logit_bias
            ctx.bias_dtype = logit_bias.dtype
        constants = () if ctx.needs_input_grad[0] else (of_experts,)
        experts, weights, share_sums = _chosen(ctx, logits, bias, router, constants)
        ctx.save_for_backward(logits, experts, x, weight)
        return of_experts, experts, weights, share_sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, experts, x, weight = ctx.saved_tensors
        dx, *of_routing = grads
        biased = ctx.needs_input_grad[2]
        terms, dbias = _choice_bwd(ctx, tuple(of_routing), logits, experts, not biased), None
        if biased:  # the two terms hold 16 bits of its 24
            terms, dbias = _terms(terms), terms.sum(0).to(ctx.bias_dtype)
        dx, dweight = _logits_bwd(ctx, terms, x, weight, dx)
        return dx, dweight, dbias, None, None


def _chosen(
    ctx: Any, logits: Tensor, bias: Tensor, router: _Choice, constants: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """The routing. constants: other outputs without a gradient."""
    experts, weights, share_sums = ops.route(logits, bias, *router)
    ctx.mark_non_differentiable(experts, *constants)
    ctx.set_materialize_grads(False)  # zeros for an output without a gradient are a kernel
    ctx.router = router
    return experts, weights, share_sums.sum(0)


def _choice_bwd(ctx: Any, grads: tuple[Tensor | None, ...], logits: Tensor, experts: Tensor, split: bool) -> Tensor:
    """The gradient of the logits, or its two bf16 terms."""
    (_, dweights, dshares), router = grads, ctx.router
    zeros = partial(torch.zeros, dtype=torch.float32, device=logits.device)
    dweights = zeros(experts.shape) if dweights is None else dweights.contiguous()
    if dshares is not None:
        dshares = dshares.contiguous()
    elif split and router.score_func != "sigmoid":  # zeros change only a zero's sign, which no product shows
        dshares = logits.new_empty(0)
    else:  # they also take a NaN of one expert's sigmoid to the others
        dshares = zeros(logits.shape[1])
    return ops.route_bwd(
        dweights, dshares, logits, experts, router.score_func, router.normalize, router.route_scale, split
    )


_route, _router = differentiable("route", _Route), differentiable("route", _Router)


def route_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, selection_bias: Tensor | None, router: RouterConfig
) -> tuple[Tensor, Routing]:
    """x for the experts, and `route` of `router_logits`, for checked arguments."""
    bias_of_choice, choice = _selection("route", selection_bias, weight.shape[:1], x.device), _Choice(**router.options)
    if x.dtype == weight.dtype == torch.bfloat16 and not _autocast(x):
        of_experts, experts, weights, shares = _router(x, weight, bias, bias_of_choice, choice)
        return of_experts, Routing(experts, weights, shares)
    return x, Routing._make(_route(router_logits(x, weight, bias), bias_of_choice, choice))


def _selection(op: str, bias: Tensor | None, shape: tuple[Any, ...], device: torch.device) -> Tensor:
    """The selection bias as the op takes it, (0,) for none."""
    if bias is None:
        return torch.empty(0, dtype=torch.float32, device=device)
    return check_selection_bias(op, bias, shape, device).detach().contiguous()


def route(logits: Tensor, router: RouterConfig, *, selection_bias: Tensor | None = None) -> Routing:
    """Choose `router.top_k` experts for each token.

    The weights and the shares are differentiable in the logits. The result has the same bits on every device and in
    both frameworks, except for the last sum of `shares`.

    Args:
        logits: (T, E) float32 or bfloat16, E up to 512.
        router: The choice. Its fields `bias` and `prob_in` are for layers; this function does not read them.
        selection_bias: (E,) float32, added to the scores for the choice and not for the weights. It is required if
            `router.selection_bias` is True.

    Returns:
        The experts, their weights, and the shares. Of equal scores the lower expert is first. A NaN logit makes its
        token's weights NaN; of sigmoid scores without `normalize` only its expert's weight, and that expert is chosen.

    Raises:
        ValueError: For shapes, devices and values that are not allowed.
        TypeError: For other dtypes and types.

    Example:
        >>> router = RouterConfig(2, score_func="sigmoid", normalize=False)
        >>> experts, weights, _ = route(torch.tensor([[0.0, 2.0, 1.0]]), router)
        >>> experts.tolist(), [round(w, 4) for w in weights[0].tolist()]
        ([[1, 2]], [0.8808, 0.7311])

    Source:
        Fedus et al., "Switch Transformers", 2021; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2.
    """
    op = "route"
    check_plain(op, "logits", logits)
    require_tensor(op, "logits", logits)
    if logits.dtype not in FLOATS:
        fail(TypeError, op, "logits", f"dtype {logits.dtype}", "allowed: float32 or bfloat16")
    check_shape(op, "logits", logits, ("T", "E"))
    router = check_router(op, router, logits.shape[1])
    if router.selection_bias and selection_bias is None:
        fail(ValueError, op, "selection_bias", None, "allowed: a tensor (E,) float32 with router.selection_bias=True")
    bias = _selection(op, selection_bias, logits.shape[-1:], logits.device)
    return Routing._make(_route(logits, bias, _Choice(**router.options)))


def check_selection_bias(op: str, bias: Tensor, shape: tuple[Any, ...], device: torch.device | None) -> Tensor:
    """The bias; raises unless it is float32, of this shape and on the device of the logits."""
    require_tensor(op, "selection_bias", bias)
    if bias.dtype != torch.float32:
        fail(TypeError, op, "selection_bias", f"dtype {bias.dtype}", "allowed: float32")
    check_shape(op, "selection_bias", bias, shape)
    if device is not None:
        check_devices(op, "logits", device, selection_bias=bias)
    return bias


def external_routing(
    op: str, x: Tensor, num_experts: int, experts: Tensor | None, weights: Tensor | None
) -> Routing | None:
    """Experts and weights that the caller of a layer has chosen, or None without both; x (..., D). shares are zeros.

    Raises unless experts (..., k) are int32 or int64, weights (..., k) are float32, and both are on the device of x;
    where values are checked, also for experts that do not exist.
    """
    if experts is None or weights is None:
        if experts is weights:
            return None
        name, other = ("experts", "weights") if experts is None else ("weights", "experts")
        fail(ValueError, op, name, "None", f"allowed: a tensor with {other}, or neither")
    check_counts(op, "experts", experts, x.device)
    if experts.dtype not in (torch.int32, torch.int64):
        fail(TypeError, op, "experts", f"dtype {experts.dtype}", "allowed: int32 or int64")
    if experts.dim() != x.dim() or not experts.shape[-1]:
        fail(ValueError, op, "experts", f"shape {tuple(experts.shape)}", f"allowed: {(*x.shape[:-1], 'k')}, k above 0")
    check_shape(op, "experts", experts, (*x.shape[:-1], experts.shape[-1]))
    check_plain(op, "weights", weights)
    require_tensor(op, "weights", weights)
    if weights.dtype != torch.float32:
        fail(TypeError, op, "weights", f"dtype {weights.dtype}", "allowed: float32")
    check_shape(op, "weights", weights, tuple(experts.shape))
    check_devices(op, "x", x.device, weights=weights)
    if reads_values(experts) and experts.numel():
        low, high = (int(e) for e in experts.aminmax())
        if low < 0 or high >= num_experts:
            fail(ValueError, op, "experts", f"{low} to {high}", f"allowed: 0 to {num_experts - 1}")
    flat = experts.reshape(-1, experts.shape[-1]).to(torch.int32)
    return Routing(flat, weights.reshape(flat.shape), weights.new_zeros(num_experts))


def update_selection_bias(selection_bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Compute selection_bias + rate * sign(mean(counts) - counts): the load balance of DeepSeek-V3 without a loss.

    A training loop calls it after each step:

        moe.selection_bias.copy_(update_selection_bias(moe.selection_bias, stats.counts, 0.001))

    Args:
        selection_bias: (E,) float32.
        counts: (E,) of an integer dtype, the rows of each expert in the last step, as `MoEStats.counts`. The caller
            sums them over data-parallel ranks first.
        rate: A positive number; 0.001 for DeepSeek-V3.

    Returns:
        (E,) float32.

    Raises:
        ValueError: For shapes, devices and rates that are not allowed, and for negative counts where values are
            checked.
        TypeError: For other dtypes.

    Example:
        >>> update_selection_bias(torch.zeros(3), torch.tensor([4, 1, 1]), 0.5).tolist()
        [-0.5, 0.5, 0.5]

    Source:
        Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.
    """
    op = "update_selection_bias"
    require_tensor(op, "selection_bias", selection_bias)
    check_selection_bias(op, selection_bias, ("E",), None)
    check_counts(op, "counts", counts, selection_bias.device)
    check_shape(op, "counts", counts, tuple(selection_bias.shape))
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        fail(TypeError, op, "rate", repr(rate), "allowed: a float")
    if not 0 < rate < float("inf"):
        fail(ValueError, op, "rate", rate, "allowed: positive finite numbers")
    if reads_values(counts) and (counts < 0).any():
        fail(ValueError, op, "counts", counts.tolist(), "allowed: counts of at least 0")
    load = counts.detach().float()
    return selection_bias.detach() + rate * torch.sign(load.mean() - load)
