"""The experts' feed-forward as one differentiable function: x is quantized once, h is never stored.

    forward (MXFP8)
      x --rows--> q, sf --w1--> gate --.
                    '-----w3--> up  ---+--swiglu_row--> q, sf --w2--> out        saved: x, gate, up
    backward
      dout --rows--> q, sf --w2--> dh --swiglu_bwd--> dgate, dup   rows:   --w1 + w3--> dx  (fp32 sum, rounded once)
        '---tokens--------.  |                          |          tokens: with x's   --> dw1, dw3
                          '--+-- h again, from gate and up                 with dout's --> dw2

    rows      bytes along the rows: straight from swiglu_bwd_both (recipe "mxfp8"), or quantized from bf16
    tokens    recipe "mxfp8": bytes along the tokens, from quantize_both, swiglu_bwd_both and swiglu_col; else bf16

Where the products multiply folded operands, each is folded just before (products.py), once for both of its products;
x and dout, where they are not MX, both ways in one read, and what w1 and w3 need of x's tokens is saved instead of x.
Recipe "bf16" has the same picture without the bytes. h, dgate and dup are rounded to bf16 before they are
quantized, so all this gives the bytes of the separate functions. dx alone differs: autograd adds two rounded
products and rounds again. Where groups must be padded to whole blocks of tokens, dgate, dup and h pass as bf16.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Form, Recipe
from . import ops
from ._checks import check_devices, check_offs, check_rows, check_token_blocks, check_weights
from .products import (
    Operand,
    activation,
    form_on,
    gradient_operands,
    input_gradient,
    is_mx,
    pad_to_blocks,
    product,
    tokens_of,
    weight_gradient,
)
from .swiglu import weights
from .weights import MX, Folded

BF16 = torch.bfloat16
Unread = Any
"""An operand, or None where nobody asks for it."""


class _SwiGLUFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, offs: Tensor, prob: Tensor,
        form: Form, wgrad_with_hp: bool, pad: bool, tokens_follow: bool, rounding: int,
    ) -> Tensor:  # fmt: skip
        prob = prob.contiguous()
        rows, tokens = activation(x, form, rounding, offs if tokens_follow else None)
        gate = product(rows, w1, offs, BF16, form, rounding)
        up = product(rows, w3, offs, BF16, form, rounding)
        h = MX(*ops.swiglu_row(gate, up, prob, rounding)) if is_mx(form) else ops.swiglu(gate, up, prob)
        x_is_read = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        kept = (None, *tokens) if tokens else (x if x_is_read else None, None, None)
        ctx.save_for_backward(*kept, w1, w3, w2, offs, prob, gate, up)
        ctx.x_dtype = x.dtype
        ctx.form, ctx.pad, ctx.rounding = form, pad, rounding
        ctx.wgrad_mx = is_mx(form) and not wgrad_with_hp
        return product(h, w2, offs, BF16, form, rounding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, qf_t, span_sf, w1, w3, w2, offs, prob, gate, up = ctx.saved_tensors
        need_x, need_w1, need_w3, need_w2, _, need_prob = ctx.needs_input_grad[:6]
        precision = ctx.form, ctx.rounding
        steps = _Backward(offs, gate, up, prob, ctx)
        dx = dw1 = dw3 = dw2 = dprob = None
        dout, dout_tokens = steps.output_gradient(grads[0], need_w2)
        if need_w2:
            dw2 = weight_gradient(dout_tokens, steps.hidden_tokens(), steps.token_ends, w2.dtype)
        if need_x or need_w1 or need_w3 or need_prob:
            dh = input_gradient(dout, w2, offs, BF16, *precision)
            (dgate, dgate_tokens), (dup, dup_tokens), dprob = steps.swiglu(dh, need_x, need_w1 or need_w3)
            if need_x:
                dx = input_gradient(dgate, w1, offs, torch.float32, *precision)
                dx = dx.add_(input_gradient(dup, w3, offs, torch.float32, *precision)).to(ctx.x_dtype)
            x = x if qf_t is None else Folded(qf_t, span_sf)
            x_tokens: Unread = steps.tokens(x) if need_w1 or need_w3 else None
            if need_w1:
                dw1 = weight_gradient(dgate_tokens, x_tokens, steps.token_ends, w1.dtype)
            if need_w3:
                dw3 = weight_gradient(dup_tokens, x_tokens, steps.token_ends, w3.dtype)
        return dx, dw1, dw3, dw2, None, dprob, None, None, None, None, None


class _Backward:
    """The operands of the backward products, in the forms that a recipe multiplies."""

    def __init__(self, offs: Tensor, gate: Tensor, up: Tensor, prob: Tensor, ctx: Any) -> None:
        self.glu, self.rounding = (gate, up, prob), ctx.rounding
        self.form = ctx.form
        self.wgrad_mx = ctx.wgrad_mx
        self.fused = self.wgrad_mx and not ctx.pad
        pad = self.wgrad_mx and ctx.pad
        self.row_map, self.token_ends = pad_to_blocks(offs, gate.shape[0]) if pad else (None, offs)

    def tokens(self, x: Tensor | MX | Folded) -> Operand:
        if not self.wgrad_mx:
            return x
        return tokens_of(x, self.form, self.rounding, self.token_ends, self.row_map)

    def output_gradient(self, dout: Tensor, need_tokens: bool) -> tuple[Unread, Unread]:
        """For the rows, and for the tokens."""
        if not need_tokens:
            return dout, None
        if self.fused:
            return gradient_operands(dout, self.form, self.rounding, self.token_ends)
        return dout, self.tokens(dout)

    def hidden_tokens(self) -> Operand:
        if self.fused:
            return self.tokens(MX(*ops.swiglu_col(*self.glu, self.rounding)))
        return self.tokens(ops.swiglu(*self.glu))

    def swiglu(
        self, dh: Tensor, need_rows: bool, need_tokens: bool
    ) -> tuple[tuple[Unread, Unread], tuple[Unread, Unread], Tensor]:
        """dgate and dup, each for the rows and for the tokens, and dprob."""
        if self.fused and need_rows and need_tokens:
            q, sf, q_t, sf_t, *up, dprob = ops.swiglu_bwd_both(dh, *self.glu, self.rounding)
            gate_tokens, up_tokens = self.tokens(MX(q_t, sf_t)), self.tokens(MX(*up[2:]))
            return (MX(q, sf), gate_tokens), (MX(*up[:2]), up_tokens), dprob
        if self.fused and need_tokens:
            q_t, sf_t, *up, dprob = ops.swiglu_bwd_col(dh, *self.glu, self.rounding)
            return (None, self.tokens(MX(q_t, sf_t))), (None, self.tokens(MX(*up))), dprob
        if is_mx(self.form) and need_rows and not need_tokens:
            q, sf, *up, dprob = ops.swiglu_bwd_row(dh, *self.glu, self.rounding)
            return (MX(q, sf), None), (MX(*up), None), dprob
        dgate, dup, dprob = ops.swiglu_bwd(dh, *self.glu)
        if not need_tokens:
            return (dgate, None), (dup, None), dprob
        return (dgate, self.tokens(dgate)), (dup, self.tokens(dup)), dprob


# As in autograd.py: an MXTensor may arrive as the gradient.
@torch.compiler.allow_in_graph
def _swiglu_ffn(*args: Any) -> Tensor:
    return cast(Tensor, _SwiGLUFFN.apply(*args))


def grouped_swiglu_ffn(
    x: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    offs: Tensor,
    prob: Tensor | None = None,
    recipe: Recipe | str = "mxfp8_wgrad_with_hp",
    pad_token_groups_for_grouped_mm: bool = False,
) -> Tensor:
    """(silu(x w1^T) * (x w3^T) * prob) w2^T for each group of rows; differentiable in x, the weights and prob.

    x: (P, D) bfloat16 or float32, quantized here, once; or an MXTensor that already is (recipe "bf16" takes its
        values).
    w1, w3: (G, F, D), w2: (G, D, F), contiguous, bfloat16 or float32; D, F multiples of 32.
    offs: (G,) int32, where each group of rows ends; rows past the last end give zeros.
    prob: (P,) float32, a weight for each row of h; None: all weigh one.
    recipe: a Recipe or its name. "mxfp8" quantizes along the tokens for the weight gradients, which needs ends
        that are multiples of 32, or pad_token_groups_for_grouped_mm=True.

    Returns (P, D) bfloat16. The gradient of x has x's dtype, those of the weights theirs. The gradient that arrives
    may be an MXTensor. Raises ValueError (shapes, layout, ends) and TypeError (dtypes), as `mxfp8_grouped_mm` does.

    >>> x, w = torch.ones(1, 32), torch.full((1, 32, 32), 1 / 32)
    >>> grouped_swiglu_ffn(x, w, w, w, torch.tensor([1], dtype=torch.int32))[0, 0].item()  # sigmoid(1) = 0.731
    0.75
    """
    op, recipe = "grouped_swiglu_ffn", Recipe.parse(recipe)
    check_rows(op, "x", x)
    for name, w in (("w1", w1), ("w3", w3), ("w2", w2)):
        check_weights(op, name, w)
    groups, f, d = w1.shape
    if x.shape[1] != d:
        fail(ValueError, op, "x", f"shape {tuple(x.shape)}", f"allowed: (P, {d}), the D of w1 (G, F, D)")
    for name, w, shape in (("w3", w3, (groups, f, d)), ("w2", w2, (groups, d, f))):
        if w.shape != shape:
            fail(ValueError, op, name, f"shape {tuple(w.shape)}", f"allowed: {shape}, by w1's {tuple(w1.shape)}")
    for name, size in (("F", f), ("D", d)):
        if size % BLOCK:
            fail(ValueError, op, "w1", f"{name} = {size}", f"allowed: multiples of {BLOCK}")
    for name, w in (("w1", w1), ("w3", w3), ("w2", w2)):
        if not w.is_contiguous():
            fail(ValueError, op, name, f"strides {w.stride()}", "allowed: contiguous weights; call .contiguous()")
    if not isinstance(pad_token_groups_for_grouped_mm, bool):
        got = repr(pad_token_groups_for_grouped_mm)
        fail(TypeError, op, "pad_token_groups_for_grouped_mm", got, "allowed: bool")
    prob = weights(op, prob, x)
    check_devices(op, "x", x.device, w1=w1, w3=w3, w2=w2, prob=prob)
    check_offs(op, offs, x, groups, "x", "w1")
    in_blocks = torch.is_grad_enabled() and recipe.wgrad_mx and not pad_token_groups_for_grouped_mm
    if in_blocks and any(w.requires_grad for w in (w1, w3, w2)):
        check_token_blocks(op, "x", x.shape[0], offs, "pass pad_token_groups_for_grouped_mm=True")
    form, pad = form_on(recipe, x.device), pad_token_groups_for_grouped_mm
    tokens_follow = in_blocks and (w1.requires_grad or w3.requires_grad)
    options = recipe.wgrad_with_hp, pad, tokens_follow, int(recipe.rounding)
    return _swiglu_ffn(x, w1, w3, w2, offs, prob, form, *options)
