"""`grouped_swiglu_ffn` with gate and up in one tensor, as halves: the same bytes without a copy of weights or of rows.

    gate_up (E, 2F, D) is (2E, F, D): gate of expert 0, up of expert 0, gate of expert 1, ...
    gates   the first 2E - 1 of them     ends e0 e0 e1 e1 ...: the rows of expert e are group 2e, odd groups are empty
    ups     the last 2E - 1 of them      the same ends: up of expert e is group 2e here

Both are quantized at once, and gate, up and the two parts of dx are products of these views. The gradient of gate_up is
one product with the token operands of dgate and dup, joined.
"""

from typing import Any

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from ..core_kernels.swiglu.activation import SwiGLU
from . import _direct as ops
from ._checks import check_devices, check_floats, check_group_ends, check_token_blocks
from ._differentiable import differentiable, save, saved_by
from .products import (
    Operand,
    ProductOptions,
    is_mx,
    output_gradient_operands,
    product,
    quantize_activation,
    row_operand,
    sum_of_products,
    token_operand,
    weight_gradient,
)
from .weights import MX, WeightOperand, along_n, at_address, check_weights, for_call, form_of, outlives_forward

BF16 = torch.bfloat16


class _PackedFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, group_ends: Tensor, options: ProductOptions,
        numbers: tuple[float, float, float], save_bytes: bool,
    ) -> Tensor:  # fmt: skip
        form, rounding, *_ = options
        need_x, need_gate_up, _ = ctx.needs_input_grad[:3]
        need_dh = need_x or need_gate_up
        pairs, pair_ends = (
            gate_up.view(-1, gate_up.shape[1] // 2, gate_up.shape[2]),
            group_ends.repeat_interleave(2)[:-1],
        )
        need_tokens = options.whole_blocks and need_gate_up
        rows, tokens = quantize_activation(x, form, rounding, group_ends if need_tokens else None)
        pairs_k, pairs_n = for_call(pairs, None, form, rounding, need_x and save_bytes)
        down_k, down_n = for_call(down, None, form, rounding, need_dh and save_bytes)
        glu = (
            *(product(rows, part, pair_ends, BF16) for part in _gates_and_ups(pairs_k)),
            torch.empty(0, dtype=torch.float32, device=x.device),
        )
        if is_mx(form):
            h: Operand = MX(*ops.swiglu_row(*glu, rounding, False, *numbers))
        else:
            h = ops.swiglu(*glu, *numbers)
        weights = (pairs_n or pairs) if need_x else None, (down_n or down) if need_dh else None
        save(ctx, ((tokens or x) if need_gate_up else None, weights, (group_ends, pair_ends), glu))
        ctx.dtypes, ctx.options, ctx.numbers = (x.dtype, gate_up.dtype, down.dtype), options, numbers
        return product(row_operand(h, form, rounding), down_k, group_ends, BF16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, (pairs, down), (group_ends, pair_ends), glu = saved_by(ctx)
        need_x, need_gate_up, need_down = ctx.needs_input_grad[:3]
        (form, rounding, wgrad_mx, *_), numbers = ctx.options, ctx.numbers
        dx = dgate_up = ddown = None

        def tokens(operand: Any) -> Operand:
            return token_operand(operand, form, rounding, group_ends) if wgrad_mx else operand

        dout: Any = grads[0]
        if need_down:
            h_tokens = MX(*ops.swiglu_col(*glu, rounding, False, *numbers)) if wgrad_mx else ops.swiglu(*glu, *numbers)
            dout_tokens = dout
            if wgrad_mx:
                dout, dout_tokens = output_gradient_operands(dout, form, rounding, group_ends)
            ddown = weight_gradient(dout_tokens, tokens(h_tokens), group_ends, ctx.dtypes[2])
        if need_x or need_gate_up:
            down_n = along_n(down, form, rounding) if isinstance(down, Tensor) else down
            dh = product(row_operand(dout, form, rounding), down_n, group_ends, BF16)
            of_gate, of_up, joined = _swiglu_gradient(dh, glu, ctx.options, numbers, need_x, need_gate_up)
            if need_x:
                pairs_n = along_n(pairs, form, rounding) if isinstance(pairs, Tensor) else pairs
                gates, ups = _gates_and_ups(pairs_n)
                of_gate, of_up = (row_operand(d, form, rounding) for d in (of_gate, of_up))
                dx = sum_of_products(of_gate, gates, of_up, ups, pair_ends, ctx.dtypes[0])
            if need_gate_up:
                dgate_up = weight_gradient(tokens(joined), tokens(x), group_ends, ctx.dtypes[1])
        return dx, dgate_up, ddown, None, None, None, None


def _gates_and_ups(pairs: WeightOperand) -> tuple[Any, Any]:
    """The views of an operand of (2E, F, D) in which group 2e is the gate, or the up, of expert e."""
    if isinstance(pairs, Tensor):
        return pairs[:-1], pairs[1:]
    return pairs._make(t[:-1] for t in pairs), pairs._make(at_address(t[1:]) for t in pairs)


def _swiglu_gradient(
    dh: Tensor, glu: tuple[Tensor, ...], options: ProductOptions, numbers: tuple[float, float, float], need_rows: bool,
    need_tokens: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """dgate and dup for the row operands, and both joined for the token operand: MX where a kernel quantizes them."""
    arguments = dh, *glu, options.rounding, False, *numbers
    if options.wgrad_mx and need_tokens:
        if need_rows:
            q, sf, *tokens, q_up, sf_up, q_up_t, sf_up_t, _ = ops.swiglu_bwd_both(*arguments)
            joined = MX(*(torch.cat(parts) for parts in zip(tokens, (q_up_t, sf_up_t), strict=True)))
            return MX(q, sf), MX(q_up, sf_up), joined
        *tokens, q_up_t, sf_up_t, _ = ops.swiglu_bwd_col(*arguments)
        return None, None, MX(*(torch.cat(parts) for parts in zip(tokens, (q_up_t, sf_up_t), strict=True)))
    if is_mx(options.form) and not need_tokens:
        q, sf, q_up, sf_up, _ = ops.swiglu_bwd_row(*arguments)
        return MX(q, sf), MX(q_up, sf_up), None
    dgate, dup, _ = ops.swiglu_bwd(dh, *glu, *numbers)
    return dgate, dup, torch.cat([dgate, dup], 1) if need_tokens else None


_packed_ffn = differentiable("packed_ffn", _PackedFFN)


def packed_ffn(
    op: str, x: Tensor, gate_up: Tensor, down: Tensor, group_ends: Tensor, recipe: Recipe, activation: SwiGLU
) -> Tensor:
    """(silu(gate) * up) down^T for each group of rows, in the name of `op`; differentiable in x and the weights.

    x: (P, D) bf16, fp32 or an MXTensor. gate_up: (E, 2F, D), gate then up; down: (E, D, F); contiguous, bf16 or fp32.
    group_ends: (E,); multiples of 32 if a weight gradient quantizes the tokens. Returns (P, D) bf16, zeros past the
    last end. Raises ValueError and TypeError as `grouped_swiglu_ffn` does.
    """
    check_floats(op, "hidden_states", x)
    named = {"gate_up_proj": gate_up, "down_proj": down}
    for name, w in named.items():
        check_weights(op, name, w, form_of(recipe, x.device), recipe.rounding)
        if not w.is_contiguous():
            fail(ValueError, op, name, f"strides {w.stride()}", "allowed: contiguous weights")
    experts, d, f = down.shape
    if gate_up.shape != (experts, 2 * f, d):
        allowed = f"allowed: {(experts, 2 * f, d)}, by down_proj's {tuple(down.shape)}"
        fail(ValueError, op, "gate_up_proj", f"shape {tuple(gate_up.shape)}", allowed)
    if x.shape[1] != d:
        fail(ValueError, op, "hidden_states", f"shape {tuple(x.shape)}", f"allowed: (P, {d})")
    for name, size in (("F", f), ("D", d)):
        if size % BLOCK:
            fail(ValueError, op, "down_proj", f"{name} = {size}", f"allowed: multiples of {BLOCK}")
    check_devices(op, "hidden_states", x.device, **named)
    group_ends = check_group_ends(op, "group_ends", group_ends, x, experts, "hidden_states", "down_proj")
    need_wgrad = torch.is_grad_enabled() and any(w.requires_grad for w in named.values())
    options = ProductOptions.of(recipe, x.device, False, need_wgrad)
    if options.whole_blocks:
        check_token_blocks(op, "hidden_states", "group_ends", x.shape[0], group_ends, "pad the groups")
    save_bytes = all(map(outlives_forward, named.values()))
    return _packed_ffn(x, gate_up, down, group_ends, options, activation.attributes, save_bytes)
