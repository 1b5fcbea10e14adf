"""The experts' feed-forward as one differentiable function: x is quantized once, h is never stored.

    forward (MXFP8)
      x --rows--> q, sf --w1--> gate --.
                    '-----w3--> up  ---+--swiglu_row--> q, sf --w2--> out        saved: x, gate, up
    backward
      dout --rows--> q, sf --w2--> dh --swiglu_bwd--.--> dgate, dup   rows:   --w1 + w3--> dx  (one sum, rounded once)
        |                                           |                 tokens: with x's    --> dw1, dw3
        '---tokens-------------------------------.  '--> h again      tokens:
                                                 '------------------- with h's            --> dw2

    rows      quantized along the rows: directly by swiglu_bwd_all (recipe "mxfp8"), or from bf16
    tokens    recipe "mxfp8": quantized along the tokens by quantize_both and swiglu_bwd_all; else bf16

With form "fold", products.py folds each operand once for both of its products; gate and up are one launch, and so are
dw1 and dw3. The kernel that computes h folds its rows; swiglu_bwd_fold, in place of swiglu_bwd_all, folds all that it
computes. One read of a bf16 x or dout produces its row and token operands, and the backward saves the token operand of
x instead of x. Recipe "bf16" follows the same picture without quantization. h, dgate and dup are rounded to bf16 before
they are quantized, so the bytes are those of the separate functions. dx alone differs: autograd would add two rounded
products and round again, and folded rows of dgate and dup have a headroom. With padding to whole blocks of tokens,
dgate, dup and h are bf16 tensors; so are dgate and dup with b1 or b3, whose gradients sum them. A row's weight
multiplies h and b2, so that it multiplies the row of out; its gradient has a part of each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core_kernels.recipe import Recipe
from ..core_kernels.swiglu.activation import PLAIN, SwiGLU
from ._checks import check_flag, check_floats, check_group_ends
from ._differentiable import differentiable, save, saved_by
from ._launch import check_devices
from ._ranges import named
from .backward_operands import BackwardOperands, Unused
from .grouped_mm import ends_by_hand
from .groups import GroupEnds
from .products import (
    ProductOptions,
    bias_gradient,
    bias_row_products,
    pair_of_products,
    pair_of_weight_gradients,
    product,
    quantize_activation,
    row_operand,
    sum_of_products,
    weight_gradient,
)
from .swiglu import hidden_rows, row_probabilities
from .weights import Held, Quantized, WeightOperand, Weights, check_ffn_weights, for_call, outlives_forward

BF16 = torch.bfloat16
Bias = Tensor | None


class FFNCall(NamedTuple):
    """What one call of the feed-forward has beside its tensors.

    numbers: of the activation. weighted: `prob` weights b2 too. save_bytes: the quantized weights may live until the
    backward. recompute: it multiplies gate and up again. needs: x, w1, w3, w2, prob, b1, b3 and b2 need gradients.
    """

    options: ProductOptions
    numbers: tuple[float, float, float]
    weighted: bool
    save_bytes: bool
    recompute: bool
    needs: tuple[bool, ...] = ()

    @property
    def need_dh(self) -> bool:
        need_x, need_w1, need_w3, _, need_prob, need_b1, need_b3, _ = self.needs
        return need_x or need_w1 or need_w3 or need_prob or need_b1 or need_b3


def weight_operands(
    call: FFNCall, weights: Sequence[Tensor], held: Sequence[Held]
) -> list[tuple[WeightOperand, Quantized | None]]:
    """`for_call` of w1, w3 and w2; with `recompute`, unless held, along K alone, for the forward."""
    (form, rounding, *_), (need_x, *_) = call.options, call.needs
    needs = [need and call.save_bytes and not call.recompute for need in (need_x, need_x, call.need_dh)]
    return [for_call(w, h, form, rounding, need) for w, h, need in zip(weights, held, needs, strict=True)]


def ffn_forward(
    call: FFNCall, x: Tensor, weights: Sequence[Tensor], prob: Tensor, biases: Sequence[Bias], held: Sequence[Held],
    group_ends: Tensor, out: Tensor | None = None,
) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
    """Return (P, D), written to `out` if there is one, and what `FFNBackward` reads, tensors and None in nested tuples.
    weights, biases and held are of w1, w3, w2."""
    (w1, w3, w2), (b1, b3, b2), options = weights, biases, call.options
    prob, (form, rounding, *_) = prob.contiguous(), options
    need_x, need_w1, need_w3, _, need_prob, *_ = call.needs
    again, need_tokens = call.recompute, options.whole_blocks and (need_w1 or need_w3)
    rows, tokens = quantize_activation(x, form, rounding, group_ends if need_tokens and not again else None)
    (gate_w, gate_t), (up_w, up_t), (down_w, down_t) = weight_operands(call, weights, held)
    gate, up = pair_of_products(rows, (gate_w, up_w), group_ends, BF16, (b1, b3))
    h = hidden_rows(gate, up, prob, form, rounding, call.numbers)
    saved = (
        (tokens or x) if need_w1 or need_w3 or again else None,
        (gate_t or w1, up_t or w3) if need_x else None,
        (down_t or w2) if call.need_dh else None,
        (group_ends, prob, *((None, None) if again else (gate, up))),
        b2 if need_prob else None,
        ((w1, w3), (b1, b3), tuple(h if h and h[1] else None for h in held[:2])) if again else None,
    )
    h, weights_of_b2 = row_operand(h, form, rounding), prob if call.weighted else None
    return product(h, down_w, group_ends, BF16, b2, weights_of_b2, out), saved


def _gate_and_up(call: FFNCall, x: Tensor, first: tuple[Any, Any, Any], group_ends: Tensor) -> tuple[Any, Unused, Any]:
    """gate and up again; x as weight gradients read it; w1 and w3 along N. first: their values, biases, held bytes."""
    (weights, biases, held), (need_x, need_w1, need_w3, *_), options = first, call.needs, call.options
    ends = group_ends if options.whole_blocks and (need_w1 or need_w3) else None
    rows, tokens = quantize_activation(x, options.form, options.rounding, ends)
    gate, up = (for_call(w, h, options.form, options.rounding, need_x) for w, h in zip(weights, held, strict=True))
    products = pair_of_products(rows, (gate[0], up[0]), group_ends, BF16, biases)
    return products, tokens or x, (gate[1] or weights[0], up[1] or weights[1])


class FFNBackward:
    """The gradients of one forward, in parts: other work may lie between those of the inputs and of the weights.

    saved: of `ffn_forward`. dtypes: of x, w1, w3, w2. Each part lets go of the operands that no later one reads;
    `gate_and_up` is the last.
    """

    def __init__(self, call: FFNCall, saved: tuple[Any, ...], dout: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        self.x, self.in_weights, self.w2, (group_ends, prob, gate, up), self.b2, again = saved
        if again:
            (gate, up), self.x, self.in_weights = _gate_and_up(call, self.x, again, group_ends)
        self.call, self.given, self.dtypes, self.group_ends, self.prob = call, dout, dtypes, group_ends, prob
        self.steps = BackwardOperands(group_ends, gate, up, prob, call.options, call.numbers)
        self.dout, self.dout_tokens = self.steps.output_gradient(dout, call.needs[3])
        self.of_gate: tuple[Unused, Tensor | None] = (None, None)  # token operand, values
        self.of_up: tuple[Unused, Tensor | None] = (None, None)

    def down(self, out: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of w2, written to `out` if there is one, and of b2."""
        (_, _, _, need_w2, _, _, _, need_b2), dw2, db2 = self.call.needs, None, None
        if need_w2:
            tokens, ends = (self.dout_tokens, self.steps.hidden_tokens()), self.steps.token_ends
            dw2 = weight_gradient(*tokens, ends, self.dtypes[3], out)
        del self.dout_tokens
        if need_b2:
            db2 = bias_gradient(self.given, self.group_ends, self.prob if self.call.weighted else None)
        return dw2, db2

    def inputs(self, out: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of x, written to `out` if there is one, and of prob."""
        need_x, need_w1, need_w3, _, need_prob, need_b1, need_b3, _ = self.call.needs
        need_values, need_tokens, steps, dx = need_b1 or need_b3, need_w1 or need_w3, self.steps, None
        if not (need_x or need_tokens or need_prob or need_values):
            return None, None
        # dh has no name here, so that `swiglu` lets go of it.
        (dgate, gate_tokens), (dup, up_tokens), dprob, values = steps.swiglu(
            self._dh(), need_x, need_tokens, need_values, self.call.needs[3]
        )
        dgate_values, dup_values = values or (None, None)
        self.of_gate, self.of_up = (gate_tokens, dgate_values), (up_tokens, dup_values)
        if need_prob and self.b2 is not None:
            dprob = dprob + bias_row_products(self.given, self.b2, self.group_ends)
        if need_x:
            gate_t, up_t = map(steps.along_n, self.in_weights)
            dgate, dup = steps.gradient_rows(dgate), steps.gradient_rows(dup)
            dx = sum_of_products(dgate, gate_t, dup, up_t, self.group_ends, self.dtypes[0], out)
        del self.in_weights
        return dx, dprob

    def _dh(self) -> Tensor:
        """The gradient of h. It lets go of the rows of dout and of w2."""
        rows, w2 = self.steps.rows(self.dout), self.steps.along_n(self.w2)
        del self.dout, self.w2
        return product(rows, w2, self.group_ends, BF16)

    def gate_and_up(self, out: Sequence[Tensor | None] = (None, None)) -> tuple[Tensor | None, ...]:
        """Gradients of w1 and w3, written to `out` where there is one, of b1 and b3; after `inputs`."""
        _, need_w1, need_w3, _, _, need_b1, need_b3, _ = self.call.needs
        x_tokens: Unused = self.steps.tokens(self.x) if need_w1 or need_w3 else None
        del self.steps.glu, self.x
        tokens = self.of_gate[0] if need_w1 else None, self.of_up[0] if need_w3 else None
        dtypes, ends = (self.dtypes[1], self.dtypes[2]), self.steps.token_ends
        found: list[Tensor | None] = [*pair_of_weight_gradients(tokens, x_tokens, ends, dtypes, out)]
        for need, (_, values) in ((need_b1, self.of_gate), (need_b3, self.of_up)):
            found.append(bias_gradient(values, self.group_ends) if need and values is not None else None)
        return tuple(found)

    def weights(self, out: Sequence[Tensor | None] = (None, None, None)) -> tuple[Tensor | None, ...]:
        """Gradients of w1, w3 and w2, written to `out` where there is one, of b1, b3 and b2; after `inputs`."""
        dw2, db2 = self.down(out[2])
        dw1, dw3, db1, db3 = self.gate_and_up(out[:2])
        return dw1, dw3, dw2, db1, db3, db2


class _SwiGLUFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, prob: Tensor,
        b1: Bias, b3: Bias, b2: Bias, held: tuple[Held, Held, Held], group_ends: Tensor, call: FFNCall,
    ) -> Tensor:  # fmt: skip
        call = call._replace(needs=tuple(ctx.needs_input_grad[:8]))
        out, saved = ffn_forward(call, x, (w1, w3, w2), prob, (b1, b3, b2), held, group_ends)
        save(ctx, saved)
        ctx.dtypes, ctx.call = (x.dtype, w1.dtype, w3.dtype, w2.dtype), call
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        steps = FFNBackward(ctx.call, saved_by(ctx), grads[0], ctx.dtypes)
        dx, dprob = steps.inputs()
        dw1, dw3, dw2, *of_biases = steps.weights()
        return dx, dw1, dw3, dw2, dprob, *of_biases, None, None, None


_swiglu_ffn = differentiable("grouped_swiglu_ffn", _SwiGLUFFN)


def grouped_swiglu_ffn(
    x: Tensor,
    w1: Weights,
    w3: Weights,
    w2: Weights,
    group_ends: GroupEnds | None = None,
    prob: Tensor | None = None,
    *,
    b1: Tensor | None = None,
    b3: Tensor | None = None,
    b2: Tensor | None = None,
    activation: SwiGLU = PLAIN,
    recipe: Recipe | str = "mxfp8",
    pad_token_groups: bool = True,
    group_sizes: Tensor | None = None,
) -> Tensor:
    """prob * ((silu(x w1^T + b1) * (x w3^T + b3)) w2^T + b2) for each group of rows; differentiable in x, the weights,
    the biases and prob.

    x: (P, D) bfloat16 or float32, quantized here, once; or an MXTensor, used as it is. The recipes "bf16" and
        "fp8_..." dequantize an MXTensor.
    w1, w3: (G, F, D), w2: (G, D, F), contiguous, bfloat16 or float32; D and F are multiples of 32. Or their
        QuantizedWeights, whose `values` get the gradients.
    group_ends: (G,) int32 or int64, the end of each group of rows; or the RowMap or Route that laid the rows out, which
        has them. Rows past the last end give zeros.
    prob: (P,) float32, a weight for each row, which multiplies h before it is rounded, and b2; None is a weight of 1.
    b1, b3: (F,) for all groups or (G, F), b2: (D,) or (G, D), bfloat16 or float32; or None. They are added to fp32
        sums. With b1 or b3 the backward stores the gradients of gate and up in bf16 before it quantizes them; with b2
        and prob the sums of the last product are stored in fp32.
    activation: a `SwiGLU`, for models that clamp or scale gate and up.
    recipe, pad_token_groups, group_sizes: as in `grouped_mm`.

    Returns (P, D) bfloat16. The gradients have their argument's dtype. The gradient of the result may be an MXTensor.
    Raises ValueError (shapes, layout, values of group_ends) and TypeError (dtypes), as `grouped_mm` does.

    >>> x, w = torch.ones(1, 32), torch.full((1, 32, 32), 1 / 32)
    >>> grouped_swiglu_ffn(x, w, w, w, torch.tensor([1]))[0, 0].item()  # sigmoid(1) = 0.731, in E4M3 0.75
    0.75
    >>> gpt_oss = SwiGLU(alpha=1.702, limit=7.0, offset=1.0)
    >>> grouped_swiglu_ffn(x, w, w, w, torch.tensor([1]), b2=torch.ones(32), activation=gpt_oss)[0, 0].item()
    2.75

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    op = "grouped_swiglu_ffn"
    check_flag(op, "pad_token_groups", pad_token_groups)
    save_bytes = all(not isinstance(w, Tensor) or outlives_forward(w) for w in (w1, w3, w2))
    weights, biases, recipe = (w1, w3, w2), (b1, b3, b2), Recipe.parse(recipe)
    (ends, known), options = ends_by_hand(op, group_ends, group_sizes, x, w1), (pad_token_groups, save_bytes)
    return swiglu_ffn(op, x, weights, ends, prob, recipe, *options, biases, activation, known=known)


@named("mxep.experts")
def swiglu_ffn(
    op: str,
    x: Tensor,
    weights: Sequence[Weights],
    group_ends: Tensor,
    prob: Tensor | None,
    recipe: Recipe,
    pad: bool,
    save_bytes: bool,
    biases: Sequence[Bias] = (None, None, None),
    activation: SwiGLU = PLAIN,
    recompute: bool = False,
    known: list[int] | None = None,
) -> Tensor:
    """`grouped_swiglu_ffn` in the name of `op`. save_bytes: quantized weights may live until the backward. known: of
    `check_group_ends`."""
    check_floats(op, "x", x)
    values, held, biases = check_ffn_weights(op, "x", x, weights, biases, recipe)
    weighted, prob = prob is not None, row_probabilities(op, prob, x)
    check_devices(op, "x", x.device, prob=prob)
    call = ffn_call(op, values, recipe, x.device, activation, pad, weighted, save_bytes, recompute)
    remedy = "pass pad_token_groups=True" if call.options.whole_blocks else None
    group_ends = check_group_ends(op, "group_ends", group_ends, x, values[0].shape[0], "x", "w1", remedy, known)
    return _swiglu_ffn(x, *values, prob, *biases, held, group_ends, call)


def ffn_call(
    op: str, weights: Sequence[Tensor], recipe: Recipe, device: torch.device, activation: SwiGLU, pad: bool,
    weighted: bool, save_bytes: bool, recompute: bool,
) -> FFNCall:  # fmt: skip
    need_wgrad = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
    numbers = SwiGLU.check(op, activation).attributes
    return FFNCall(ProductOptions.of(recipe, device, pad, need_wgrad), numbers, weighted, save_bytes, recompute)
