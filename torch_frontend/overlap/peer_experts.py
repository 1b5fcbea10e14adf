"""Experts of other ranks through memory of peers, as one differentiable function.

    forward     share counts | lay_out, push tokens | products of all experts | pull and sum rows
    backward                   push gradients       | products of all experts | pull and sum rows, weight gradients
                bars: barriers of the ranks in the stream (peer_memory.py)

Nothing overlaps: device_exchange.py runs the calls that do. The result and all gradients have the same bytes as from
`dispatch`, experts and `combine`.

A call of several rounds (rounds.py) repeats all steps and keeps the rows of each round, which it sums after the last
one. Its backward repeats the forward of the later rounds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.policy.recipe import Recipe, TransferName
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.mx_tensor import MXTensor, dequantized
from ..products.ffn import FFNBackward
from ..products.gathered_weights import copied
from ..products.grouped_mm import MMBackward
from .local_experts import FFNExperts, MMExperts
from .peer_exchange import PeerExchange
from .rows import BF16, PROB, Rows


class PeerCall(NamedTuple):
    """One call. width: of the rows of the experts. The experts weight their rows, if there are probs."""

    exchange: PeerExchange
    recipe: Recipe
    experts: FFNExperts | MMExperts
    width: int
    out_dtype: torch.dtype

    def rows(self, name: TransferName, width: int, dtype: torch.dtype) -> Rows:
        return Rows.of(self.recipe, name, width, dtype)


class _PeerExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, call: PeerCall, *parameters: Tensor | None) -> Tensor:
        need_x, need_probs, _, *need_parameters = ctx.needs_input_grad
        needs, exchange = (need_x, need_probs, *need_parameters), call.exchange
        home = call.rows("combine", call.width, BF16)
        with exchange.memory.uninterrupted():
            saved = _multiply(call, exchange, x, probs, parameters, needs)
            if exchange.later:
                slots = exchange.pull_slots(home, home.parts, None)
                for later in exchange.later:
                    other = exchange.round(later, call.recipe.alignment)
                    exchange.memory.barrier()
                    _multiply(call, other, x, probs, parameters, (False,) * len(needs))
                    slots = other.pull_slots(home, home.parts, slots)
                y = exchange.sum_slots(slots, call.out_dtype)
            else:
                y = exchange.pull(home, home.parts, call.out_dtype)
        save(ctx, (saved, (x, probs, tuple(map(copied, parameters))) if exchange.later else None))
        ctx.call, ctx.needs, ctx.dim = call, needs, x.shape[1]
        ctx.dtypes = x.dtype, *(None if p is None else p.dtype for p in parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, (need_x, need_prob, *_) = ctx.call, ctx.needs
        exchange: PeerExchange = call.exchange
        home = call.rows("dispatch_grad", ctx.dim, ctx.dtypes[0])
        parts, (saved, inputs) = [*home.parts, PROB], saved_by(ctx)
        with exchange.memory.uninterrupted():
            dout = _send_gradient(call, exchange, grads[0])
            steps = call.experts.backward(saved, dout, ctx.dtypes, ctx.needs)
            del saved
            _write_gradients(exchange, home, steps, ctx.needs)
            if not exchange.later:
                dx = exchange.pull(home, parts, home.dtype) if need_x else None
                dprobs = exchange.pull_weights(parts) if need_prob else None
                return dx, dprobs, None, *steps.weights()
            slots = exchange.pull_slots(home, parts, None) if need_x else None
            dprobs, weights = exchange.pull_weights(parts) if need_prob else None, steps.weights()
            x, probs, parameters = inputs
            for later in exchange.later:
                other = exchange.round(later, call.recipe.alignment)
                exchange.memory.barrier()
                saved = _multiply(call, other, x, probs, parameters, ctx.needs)
                dout = _send_gradient(call, other, grads[0])
                steps = call.experts.backward(saved, dout, ctx.dtypes, ctx.needs)
                del saved
                _write_gradients(other, home, steps, ctx.needs)
                slots = other.pull_slots(home, parts, slots) if need_x else None
                dprobs = other.pull_weights(parts, dprobs) if need_prob else None
                later.add(weights, steps.weights())
            dx = None if slots is None else exchange.sum_slots(slots, home.dtype)
        return dx, dprobs, None, *weights


def _multiply(
    call: PeerCall, exchange: PeerExchange, x: Tensor, probs: Tensor | None, parameters: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Rows to the experts and their products, in the memory of this rank for all ranks; what the backward needs."""
    there, home = call.rows("dispatch", x.shape[1], x.dtype), call.rows("combine", call.width, BF16)
    rows, prob = exchange.push(x, there, probs)
    exchange.memory.barrier()
    buffer = exchange.views_home(home.parts)
    prob = torch.empty(0, dtype=torch.float32, device=x.device) if prob is None else prob
    out = buffer[0] if home.rounding is None else None
    y, state = call.experts.forward(rows, prob, exchange.layout.group_ends, parameters, needs, out)
    home.write(y, buffer)
    saved = exchange.clone_if_in_buffer(state)
    exchange.memory.barrier()
    return saved


def _send_gradient(call: PeerCall, exchange: PeerExchange, grad: Tensor) -> Tensor | MXTensor:
    """This rank's operand of gradients of the experts' rows."""
    exchange.memory.barrier()
    dout, _ = exchange.push(dequantized(grad).to(BF16), call.rows("combine_grad", call.width, BF16), None)
    exchange.memory.barrier()
    return dout


def _write_gradients(
    exchange: PeerExchange, home: Rows, steps: FFNBackward | MMBackward, needs: Sequence[bool]
) -> None:
    """Gradients of rows and of their weights, in the memory of this rank for all ranks."""
    need_x, need_prob, *_ = needs
    buffer = exchange.views_home([*home.parts, PROB])
    dx, dprob = steps.inputs(buffer[0] if need_x and home.rounding is None else None)
    if dx is not None:
        home.write(dx, buffer)
    if dprob is not None and need_prob:
        buffer[-1].copy_(dprob.reshape(-1, 1))
    exchange.memory.barrier()


_peer_experts = differentiable("expert parallelism", _PeerExperts)


def run(call: PeerCall, x: Tensor, probs: Tensor | None, parameters: Sequence[Tensor | None]) -> Tensor:
    """(T, width), or rows (M, width): dispatch, experts and combine, unchecked."""
    return _peer_experts(x, probs, call, *parameters)
