"""The experts' feed-forward as one differentiable function: x is quantized once, h is never stored.

    forward (MXFP8)
      x --rows--> q, sf --w1--> gate --.
                    '-----w3--> up  ---+--swiglu_row--> q, sf --w2--> out        saved: x, gate, up
    backward
      dout --rows--> q, sf --w2--> dh --swiglu_bwd--> dgate, dup   rows:   --w1 + w3--> dx  (one sum, rounded once)
        '---tokens--------.  |                          |          tokens: with x's   --> dw1, dw3
                          '--+-- h again, from gate and up                 with dout's --> dw2

    rows      quantized along the rows: directly by swiglu_bwd_both (recipe "mxfp8"), or from bf16
    tokens    recipe "mxfp8": quantized along the tokens by quantize_both, swiglu_bwd_both and swiglu_col; else bf16

With form "fold", products.py folds each operand once for both of its products. One read of a bf16 x or dout produces
its row and token operands, and the backward saves the token operand of x instead of x. Recipe "bf16" follows the same
picture without quantization. h, dgate and dup are rounded to bf16 before they are quantized, so the bytes are those of
the separate functions. dx alone differs: autograd would add two rounded products and round again. With padding to whole
blocks of tokens, dgate, dup and h are bf16 tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Form, Recipe
from . import ops
from ._checks import check_devices, check_flag, check_floats, check_group_ends, check_token_blocks
from ._differentiable import differentiable, save, saved_by
from .products import (
    Operand,
    ProductOptions,
    is_mx,
    output_gradient_operands,
    pad_to_blocks,
    product,
    quantize_activation,
    row_operand,
    sum_of_products,
    token_operand,
    weight_gradient,
)
from .swiglu import row_probabilities
from .weights import (
    MX,
    Folded,
    Held,
    WeightOperand,
    Weights,
    along_n,
    check_weights,
    for_call,
    form_of,
    outlives_forward,
    values_and_held,
)

BF16 = torch.bfloat16
Unused = Any
"""An operand, or None if no gradient needs it."""


class _SwiGLUFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, prob: Tensor,
        held: tuple[Held, Held, Held], group_ends: Tensor, options: ProductOptions, save_bytes: bool,
    ) -> Tensor:  # fmt: skip
        prob, (form, rounding, *_) = prob.contiguous(), options
        need_x, need_w1, need_w3, _, need_prob = ctx.needs_input_grad[:5]
        need_dh = need_x or need_w1 or need_w3 or need_prob
        need_tokens = options.whole_blocks and (need_w1 or need_w3)
        rows, tokens = quantize_activation(x, form, rounding, group_ends if need_tokens else None)
        ways = [
            for_call(w, h, form, rounding, need and save_bytes)
            for w, h, need in zip((w1, w3, w2), held, (need_x, need_x, need_dh), strict=True)
        ]
        (gate_w, gate_t), (up_w, up_t), (down_w, down_t) = ways
        gate, up = product(rows, gate_w, group_ends, BF16), product(rows, up_w, group_ends, BF16)
        h = MX(*ops.swiglu_row(gate, up, prob, rounding)) if is_mx(form) else ops.swiglu(gate, up, prob)
        saved = (
            (tokens or x) if need_w1 or need_w3 else None,
            (gate_t or w1, up_t or w3) if need_x else None,
            (down_t or w2) if need_dh else None,
            (group_ends, prob, gate, up),
        )
        save(ctx, saved)
        ctx.dtypes, ctx.options = (x.dtype, w1.dtype, w3.dtype, w2.dtype), options
        return product(row_operand(h, form, rounding), down_w, group_ends, BF16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, in_weights, w2, (group_ends, prob, gate, up) = saved_by(ctx)
        need_x, need_w1, need_w3, need_w2, need_prob = ctx.needs_input_grad[:5]
        x_dtype, w1_dtype, w3_dtype, w2_dtype = ctx.dtypes
        steps = _Backward(group_ends, gate, up, prob, ctx.options)
        dx = dw1 = dw3 = dw2 = dprob = None
        dout, dout_tokens = steps.output_gradient(grads[0], need_w2)
        if need_w2:
            dw2 = weight_gradient(dout_tokens, steps.hidden_tokens(), steps.token_ends, w2_dtype)
        if need_x or need_w1 or need_w3 or need_prob:
            dh = product(steps.rows(dout), steps.along_n(w2), group_ends, BF16)
            (dgate, dgate_tokens), (dup, dup_tokens), dprob = steps.swiglu(dh, need_x, need_w1 or need_w3)
            if need_x:
                gate_t, up_t = map(steps.along_n, in_weights)
                dx = sum_of_products(steps.rows(dgate), gate_t, steps.rows(dup), up_t, group_ends, x_dtype)
            x_tokens: Unused = steps.tokens(x) if need_w1 or need_w3 else None
            if need_w1:
                dw1 = weight_gradient(dgate_tokens, x_tokens, steps.token_ends, w1_dtype)
            if need_w3:
                dw3 = weight_gradient(dup_tokens, x_tokens, steps.token_ends, w3_dtype)
        return dx, dw1, dw3, dw2, dprob, None, None, None, None


class _Backward:
    """The operands of the backward products, in the recipe's form."""

    def __init__(self, group_ends: Tensor, gate: Tensor, up: Tensor, prob: Tensor, options: ProductOptions) -> None:
        self.glu, self.group_ends = (gate, up, prob), group_ends
        self.form: Form = options.form
        self.rounding, self.wgrad_mx = options.rounding, options.wgrad_mx
        self.fused = options.wgrad_mx and not options.pad
        pad = options.wgrad_mx and options.pad
        self.row_map, self.token_ends = pad_to_blocks(group_ends, gate.shape[0]) if pad else (None, group_ends)

    def rows(self, x: Unused) -> Operand:
        return row_operand(x, self.form, self.rounding)

    def along_n(self, w: Operand) -> WeightOperand:
        """w: (G, N, K), or its operand along N."""
        return along_n(w, self.form, self.rounding) if isinstance(w, Tensor) else w

    def tokens(self, x: Tensor | MX | Folded) -> Operand:
        if not self.wgrad_mx:
            return x
        return token_operand(x, self.form, self.rounding, self.token_ends, self.row_map)

    def output_gradient(self, dout: Tensor, need_tokens: bool) -> tuple[Unused, Unused]:
        """Return (row operand, token operand) of dout."""
        if not need_tokens:
            return dout, None
        if self.fused:
            return output_gradient_operands(dout, self.form, self.rounding, self.token_ends)
        return dout, self.tokens(dout)

    def hidden_tokens(self) -> Operand:
        if self.fused:
            return self.tokens(MX(*ops.swiglu_col(*self.glu, self.rounding)))
        return self.tokens(ops.swiglu(*self.glu))

    def swiglu(
        self, dh: Tensor, need_rows: bool, need_tokens: bool
    ) -> tuple[tuple[Unused, Unused], tuple[Unused, Unused], Tensor]:
        """Return dgate and dup, each as (row operand, token operand), and dprob."""
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
    group_ends: Tensor,
    prob: Tensor | None = None,
    *,
    recipe: Recipe | str = "mxfp8",
    pad_token_groups: bool = True,
) -> Tensor:
    """(silu(x w1^T) * (x w3^T) * prob) w2^T for each group of rows; differentiable in x, the weights and prob.

    x: (P, D) bfloat16 or float32, quantized here, once; or an MXTensor, used as it is. The recipes "bf16" and
        "fp8_rowwise" dequantize an MXTensor.
    w1, w3: (G, F, D), w2: (G, D, F), contiguous, bfloat16 or float32; D and F are multiples of 32. Or their
        QuantizedWeights, whose `values` get the gradients.
    group_ends: (G,) int32 or int64, the end of each group of rows. Rows past the last end give zeros.
    prob: (P,) float32, a weight for each row of h; None is a weight of 1.
    recipe: a `Recipe` or its name.
    pad_token_groups: as in `grouped_mm`.

    Returns (P, D) bfloat16. The gradients have their argument's dtype. The gradient of the result may be an MXTensor.
    Raises ValueError (shapes, layout, values of group_ends) and TypeError (dtypes), as `grouped_mm` does.

    >>> x, w = torch.ones(1, 32), torch.full((1, 32, 32), 1 / 32)
    >>> grouped_swiglu_ffn(x, w, w, w, torch.tensor([1]))[0, 0].item()  # sigmoid(1) = 0.731, in E4M3 0.75
    0.75

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    op = "grouped_swiglu_ffn"
    check_flag(op, "pad_token_groups", pad_token_groups)
    save_bytes = all(not isinstance(w, Tensor) or outlives_forward(w) for w in (w1, w3, w2))
    return swiglu_ffn(op, x, (w1, w3, w2), group_ends, prob, Recipe.parse(recipe), pad_token_groups, save_bytes)


def swiglu_ffn(
    op: str,
    x: Tensor,
    weights: Sequence[Weights],
    group_ends: Tensor,
    prob: Tensor | None,
    recipe: Recipe,
    pad: bool,
    save_bytes: bool,
) -> Tensor:
    """`grouped_swiglu_ffn` of w1, w3 and w2, with its checks, in the name of `op`. save_bytes: the quantized weights
    may live until the backward (`outlives_forward`)."""
    check_floats(op, "x", x)
    for name, w in zip(("w1", "w3", "w2"), weights, strict=True):
        check_weights(op, name, w, form_of(recipe, x.device), recipe.rounding)
    (w1, w3, w2), held = zip(*map(values_and_held, weights), strict=True)
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
    prob = row_probabilities(op, prob, x)
    check_devices(op, "x", x.device, w1=w1, w3=w3, w2=w2, prob=prob)
    group_ends = check_group_ends(op, "group_ends", group_ends, x, groups, "x", "w1")
    need_wgrad = torch.is_grad_enabled() and any(w.requires_grad for w in (w1, w3, w2))
    options = ProductOptions.of(recipe, x.device, pad, need_wgrad)
    if options.whole_blocks:
        check_token_blocks(op, "x", "group_ends", x.shape[0], group_ends, "pass pad_token_groups=True")
    return _swiglu_ffn(x, w1, w3, w2, prob, held, group_ends, options, save_bytes)
