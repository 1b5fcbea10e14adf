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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Form, Recipe
from . import ops
from ._checks import check_devices, check_flag, check_offs, check_rows, check_token_blocks
from ._differentiable import differentiable, save, saved_by
from .autograd import How
from .products import (
    Operand,
    activation,
    form_on,
    gradient_operands,
    is_mx,
    pad_to_blocks,
    product,
    rows_of,
    tokens_of,
    weight_gradient,
)
from .swiglu import weights as row_weights
from .weights import (
    MX,
    Folded,
    Held,
    QuantizedWeights,
    Weights,
    along_n,
    check_float_weights,
    check_held,
    for_call,
    stays,
)

BF16 = torch.bfloat16
Unread = Any
"""An operand, or None where nobody asks for it."""


class _SwiGLUFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, prob: Tensor,
        held: tuple[Held, Held, Held], offs: Tensor, how: How, stay: bool,
    ) -> Tensor:  # fmt: skip
        prob, (form, rounding, *_) = prob.contiguous(), how
        need_x, need_w1, need_w3, _, need_prob = ctx.needs_input_grad[:5]
        need_dh = need_x or need_w1 or need_w3 or need_prob
        both_ways = how.tokens_follow and (need_w1 or need_w3)
        rows, tokens = activation(x, form, rounding, offs if both_ways else None)
        ways = [
            for_call(w, h, form, rounding, need and stay)
            for w, h, need in zip((w1, w3, w2), held, (need_x, need_x, need_dh), strict=True)
        ]
        (gate_w, gate_t), (up_w, up_t), (down_w, down_t) = ways
        gate, up = product(rows, gate_w, offs, BF16), product(rows, up_w, offs, BF16)
        h = MX(*ops.swiglu_row(gate, up, prob, rounding)) if is_mx(form) else ops.swiglu(gate, up, prob)
        saved = (
            (tokens or x) if need_w1 or need_w3 else None,
            (gate_t or w1, up_t or w3) if need_x else None,
            (down_t or w2) if need_dh else None,
            (offs, prob, gate, up),
        )
        save(ctx, saved)
        ctx.dtypes, ctx.how = (x.dtype, w1.dtype, w3.dtype, w2.dtype), how
        return product(rows_of(h, form, rounding), down_w, offs, BF16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, in_weights, w2, (offs, prob, gate, up) = saved_by(ctx)
        need_x, need_w1, need_w3, need_w2, need_prob = ctx.needs_input_grad[:5]
        x_dtype, w1_dtype, w3_dtype, w2_dtype = ctx.dtypes
        steps = _Backward(offs, gate, up, prob, ctx.how)
        dx = dw1 = dw3 = dw2 = dprob = None
        dout, dout_tokens = steps.output_gradient(grads[0], need_w2)
        if need_w2:
            dw2 = weight_gradient(dout_tokens, steps.hidden_tokens(), steps.token_ends, w2_dtype)
        if need_x or need_w1 or need_w3 or need_prob:
            dh = steps.input_gradient(dout, w2, BF16)
            (dgate, dgate_tokens), (dup, dup_tokens), dprob = steps.swiglu(dh, need_x, need_w1 or need_w3)
            if need_x:
                dx = steps.input_gradient(dgate, in_weights[0], torch.float32)
                dx = dx.add_(steps.input_gradient(dup, in_weights[1], torch.float32)).to(x_dtype)
            x_tokens: Unread = steps.tokens(x) if need_w1 or need_w3 else None
            if need_w1:
                dw1 = weight_gradient(dgate_tokens, x_tokens, steps.token_ends, w1_dtype)
            if need_w3:
                dw3 = weight_gradient(dup_tokens, x_tokens, steps.token_ends, w3_dtype)
        return dx, dw1, dw3, dw2, dprob, None, None, None, None


class _Backward:
    """The operands of the backward products, in the forms that a recipe multiplies."""

    def __init__(self, offs: Tensor, gate: Tensor, up: Tensor, prob: Tensor, how: How) -> None:
        self.glu, self.offs = (gate, up, prob), offs
        self.form: Form = how.form
        self.rounding, self.wgrad_mx = how.rounding, how.wgrad_mx
        self.fused = how.wgrad_mx and not how.pad
        pad = how.wgrad_mx and how.pad
        self.row_map, self.token_ends = pad_to_blocks(offs, gate.shape[0]) if pad else (None, offs)

    def input_gradient(self, dout: Unread, w: Operand, out_dtype: torch.dtype) -> Tensor:
        """dout (M, N) x w (G, N, K), which may be along N already -> (M, K)."""
        w = along_n(w, self.form, self.rounding) if isinstance(w, Tensor) else w
        return product(rows_of(dout, self.form, self.rounding), w, self.offs, out_dtype)

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


_swiglu_ffn = differentiable("grouped_swiglu_ffn", _SwiGLUFFN)


def grouped_swiglu_ffn(
    x: Tensor,
    w1: Weights,
    w3: Weights,
    w2: Weights,
    offs: Tensor,
    prob: Tensor | None = None,
    recipe: Recipe | str = "mxfp8_wgrad_with_hp",
    pad_token_groups_for_grouped_mm: bool = True,
) -> Tensor:
    """(silu(x w1^T) * (x w3^T) * prob) w2^T for each group of rows; differentiable in x, the weights and prob.

    x: (P, D) bfloat16 or float32, quantized here, once; or an MXTensor that already is (recipe "bf16" takes its
        values).
    w1, w3: (G, F, D), w2: (G, D, F), contiguous, bfloat16 or float32; D, F multiples of 32. Or QuantizedWeights of
        these, whose `values` get the gradients.
    offs: (G,) int32 or int64, where each group of rows ends; rows past the last end give zeros.
    prob: (P,) float32, a weight for each row of h; None: all weigh one.
    recipe: a Recipe or its name.
    pad_token_groups_for_grouped_mm: recipe "mxfp8" quantizes along the tokens for the weight gradients, in blocks of
        32. True pads the groups there, so that any offs are allowed. False, for offs that are multiples of 32 already,
        saves those passes; the weight gradients of a group whose offs are not are NaN.

    Returns (P, D) bfloat16. The gradient of x has x's dtype, those of the weights theirs. The gradient that arrives
    may be an MXTensor. Raises ValueError (shapes, layout, offs) and TypeError (dtypes), as `mxfp8_grouped_mm` does.

    >>> x, w = torch.ones(1, 32), torch.full((1, 32, 32), 1 / 32)
    >>> grouped_swiglu_ffn(x, w, w, w, torch.tensor([1], dtype=torch.int32))[0, 0].item()  # sigmoid(1) = 0.731
    0.75
    """
    op = "grouped_swiglu_ffn"
    check_flag(op, "pad_token_groups_for_grouped_mm", pad_token_groups_for_grouped_mm)
    stay = all(not isinstance(w, Tensor) or stays(w) for w in (w1, w3, w2))
    return swiglu_ffn(op, x, (w1, w3, w2), offs, prob, Recipe.parse(recipe), pad_token_groups_for_grouped_mm, stay)


def swiglu_ffn(
    op: str,
    x: Tensor,
    weights: Sequence[Weights],
    offs: Tensor,
    prob: Tensor | None,
    recipe: Recipe,
    pad: bool,
    stay: bool,
) -> Tensor:
    """`grouped_swiglu_ffn` of w1, w3, w2, with its checks. stay: what the backward needs of the weights' bytes may
    live until then (`stays`)."""
    check_rows(op, "x", x)
    values, held = [], []
    for name, w in zip(("w1", "w3", "w2"), weights, strict=True):
        if isinstance(w, QuantizedWeights):
            check_held(op, name, w, form_on(recipe, x.device), recipe.rounding)
            held.append((w.as_stored, w.transposed))
            values.append(w.values)
        else:
            check_float_weights(op, name, w)
            held.append(None)
            values.append(w)
    w1, w3, w2 = values
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
    prob = row_weights(op, prob, x)
    check_devices(op, "x", x.device, w1=w1, w3=w3, w2=w2, prob=prob)
    offs = check_offs(op, offs, x, groups, "x", "w1")
    wgrad_follows = torch.is_grad_enabled() and any(w.requires_grad for w in (w1, w3, w2))
    how = How.of(recipe, x.device, pad, wgrad_follows)
    if how.tokens_follow:
        check_token_blocks(op, "x", x.shape[0], offs, "pass pad_token_groups_for_grouped_mm=True")
    return _swiglu_ffn(x, w1, w3, w2, prob, tuple(held), offs, how, stay)
