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

With form "fold", forms/fold.py folds each operand once for both of its products; gate and up are one launch, and so are
dw1 and dw3. The kernel that computes h folds its rows; swiglu_bwd_fold, in place of swiglu_bwd_all, folds all that it
computes. One read of a bf16 x or dout produces its row and token operands, and the backward saves the token operand of
x instead of x. Recipe "bf16" follows the same picture without quantization. h, dgate and dup are rounded to bf16 before
they are quantized, so the bytes are the same as from the separate functions. dx alone differs: autograd would add two
rounded products and round again, and folded rows of dgate and dup have a headroom. With padding to whole blocks of
tokens, dgate, dup and h are bf16 tensors; so are dgate and dup with b1 or b3, whose gradients sum them. A row's weight
multiplies h and b2, so that it multiplies the row of out; its gradient has a part of each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.policy.swiglu_gradient import Needs
from ...core_kernels.swiglu.activation import PLAIN, Numbers, SwiGLU
from ..ops.checks import check_flag, check_floats, check_group_ends
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.launch import check_devices
from ..ops.ranges import named
from .backward_operands import BackwardOperands
from .forms.form import AddedBias, Glu, Operands, WeightOperands
from .grouped_mm import ends_by_hand
from .groups import GroupEnds
from .products import ProductOptions, bias_gradient, bias_row_products
from .swiglu import row_probabilities
from .weights import Cached, Weights, along_n, check_ffn_weights, outlives_forward, quantize_for_call

BF16 = torch.bfloat16
Bias = Tensor | None


class Biases(NamedTuple):
    """The biases of the three products, in the order of their weights."""

    b1: Bias = None
    b3: Bias = None
    b2: Bias = None

    @classmethod
    def check(cls, op: str, biases: object) -> "Biases":
        """Return the three biases, all None for None; raise TypeError unless it is a tuple of three."""
        if biases is None:
            return cls()
        if not isinstance(biases, tuple):
            got = type(biases).__name__
        elif len(biases) != 3:
            got = f"{len(biases)} items"
        else:
            return cls._make(biases)
        fail(TypeError, op, "biases", got, "allowed: None, or a tuple (b1, b3, b2) of tensors or None")


class FFNOptions(NamedTuple):
    """What a feed-forward has in common for all calls of a layer.

    pad: groups may end within a block of tokens. save_bytes: quantized weights may live until the backward. recompute:
    the backward multiplies gate and up again. clear_rest: rows past the last end are zeros in the result and in the
    gradients of x and prob, and in products in between; otherwise they are unspecified.
    """

    recipe: Recipe
    activation: SwiGLU = PLAIN
    pad: bool = False
    save_bytes: bool = True
    recompute: bool = False
    clear_rest: bool = True


class FFNNeeds(NamedTuple):
    """Which arguments need gradients."""

    x: bool = False
    w1: bool = False
    w3: bool = False
    w2: bool = False
    prob: bool = False
    b1: bool = False
    b3: bool = False
    b2: bool = False

    @property
    def of_swiglu(self) -> Needs:
        return Needs(self.x, self.w1 or self.w3, self.b1 or self.b3, self.w2)

    @property
    def dh(self) -> bool:
        return self.x or self.w1 or self.w3 or self.prob or self.b1 or self.b3


class FFNCall(NamedTuple):
    """The arguments of one call of the feed-forward other than tensors.

    numbers: of the activation. weighted: `prob` weights b2 too. The next three: as in `FFNOptions`.
    """

    options: ProductOptions
    numbers: Numbers
    weighted: bool
    save_bytes: bool
    recompute: bool
    clear_rest: bool
    needs: FFNNeeds = FFNNeeds()

    def activation(self, x: Tensor, group_ends: Tensor, tokens: bool = True) -> Operands:
        """Rows of x, and tokens if one read makes both and a gradient needs them."""
        whole = tokens and self.options.whole_blocks and (self.needs.w1 or self.needs.w3)
        return self.options.form.activation(x, group_ends, whole)


class Again(NamedTuple):
    """What multiplies gate and up again, of w1 and w3."""

    weights: tuple[Tensor, Tensor]
    biases: tuple[Bias, Bias]
    cached: tuple[Cached, Cached]


class FFNSaved(NamedTuple):
    """What `FFNBackward` reads: x or its tokens; w1 and w3, and w2, or their operands along N; b2, for the gradient of
    prob. Without gate and up, `again` has what they are made of."""

    x: Any
    in_weights: Any
    w2: Any
    group_ends: Tensor
    prob: Tensor
    gate: Any
    up: Any
    b2: Bias
    again: Again | None


def weight_operands(call: FFNCall, weights: Sequence[Tensor], cached: Sequence[Cached]) -> list[WeightOperands]:
    """`quantize_for_call` of w1, w3 and w2; with `recompute`, unless cached, along K alone, for the forward."""
    needs = [need and call.save_bytes and not call.recompute for need in (call.needs.x, call.needs.x, call.needs.dh)]
    return [quantize_for_call(w, h, call.options.form, need) for w, h, need in zip(weights, cached, needs, strict=True)]


def ffn_forward(
    call: FFNCall, x: Tensor, weights: Sequence[Tensor], prob: Tensor, biases: Biases, cached: Sequence[Cached],
    group_ends: Tensor, out: Tensor | None = None,
) -> tuple[Tensor, FFNSaved]:  # fmt: skip
    """Return (P, D), written to `out` if there is one, and what `FFNBackward` reads. weights and cached are of w1, w3,
    w2."""
    needs, again, form = call.needs, call.recompute, call.options.form
    prob, (b1, b3, b2) = prob.contiguous(), biases
    rows, tokens = call.activation(x, group_ends, not again)
    w1, w3, w2 = weight_operands(call, weights, cached)
    gate, up = form.mm_pair(rows, w1.along_k, w3.along_k, group_ends, BF16, b1, b3, call.clear_rest)
    in_weights = (w1.along_n or weights[0], w3.along_n or weights[1]) if needs.x else None
    del rows, w1, w3  # before h and the result are allocated
    h = form.hidden(Glu(gate, up, prob, call.numbers, group_ends))
    saved = FFNSaved(
        x=(tokens or x) if needs.w1 or needs.w3 or again else None,
        in_weights=in_weights,
        w2=(w2.along_n or weights[2]) if needs.dh else None,
        group_ends=group_ends,
        prob=prob,
        gate=None if again else gate,
        up=None if again else up,
        b2=b2 if needs.prob else None,
        again=_again(weights, biases, cached) if again else None,
    )
    added = None if b2 is None else AddedBias(b2, prob if call.weighted else None)
    return form.mm(h, w2.along_k, group_ends, BF16, added, out, call.clear_rest), saved


def _again(weights: Sequence[Tensor], biases: Biases, cached: Sequence[Cached]) -> Again:
    bytes1, bytes3 = (h if h and h.along_n else None for h in cached[:2])
    return Again((weights[0], weights[1]), (biases.b1, biases.b3), (bytes1, bytes3))


class FFNBackward:
    """The gradients of one forward, in parts: other work may run between gradients of inputs and gradients of weights.

    saved: FFNSaved. dtypes: of x, w1, w3, w2. Each part frees the operands that no later part reads; `gate_and_up` is
    the last.
    """

    def __init__(self, call: FFNCall, saved: Any, dout: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        self.call, self.form, self.given, self.dtypes = call, call.options.form, dout, dtypes
        self.x, self.in_weights, self.w2, self.group_ends, self.prob, gate, up, self.b2, again = saved
        if again is not None:
            gate, up = self._gate_and_up(again)
        self.steps = BackwardOperands(call.options, Glu(gate, up, self.prob, call.numbers, self.group_ends))
        self.dout, self.dout_tokens = dout, None
        if call.needs.w2:
            self.dout, self.dout_tokens = self.steps.both(dout, self.form.gradient)
        self.gate_tokens = self.up_tokens = None
        self.values: tuple[Tensor | None, Tensor | None] = (None, None)  # dgate and dup in bf16

    def _gate_and_up(self, again: Again) -> tuple[Tensor, Tensor]:
        """gate and up again; x as weight gradients read it, and w1 and w3 along N."""
        (w1, w3), (b1, b3), (cached1, cached3) = again
        rows, tokens = self.call.activation(self.x, self.group_ends)
        gate = quantize_for_call(w1, cached1, self.form, self.call.needs.x)
        up = quantize_for_call(w3, cached3, self.form, self.call.needs.x)
        self.x, self.in_weights = tokens or self.x, (gate.along_n or w1, up.along_n or w3)
        return self.form.mm_pair(
            rows, gate.along_k, up.along_k, self.group_ends, BF16, b1, b3, self.call.clear_rest
        )  # fmt: skip

    def down(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of w2 and of b2."""
        dw2, db2 = None, None
        if self.call.needs.w2:
            hidden, ends = self.steps.hidden_tokens(), self.steps.groups.ends
            dw2 = self.form.wgrad(self.dout_tokens, hidden, ends, self.dtypes[3])
        del self.dout_tokens
        if self.call.needs.b2:
            db2 = bias_gradient(self.given, self.group_ends, self.prob if self.call.weighted else None)
        return dw2, db2

    def inputs(self, out: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of x, written to `out` if there is one, and of prob."""
        needs, steps, dx = self.call.needs, self.steps, None
        if not needs.dh:
            return None, None
        steps.dh = self._dh()
        found = self.form.swiglu_backward(steps, needs.of_swiglu)
        dprob, dgate, dup, self.gate_tokens, self.up_tokens, self.values = found
        del found
        if needs.prob and self.b2 is not None:
            dprob = dprob + bias_row_products(self.given, self.b2, self.group_ends)
        if needs.x:
            w1, w3 = along_n(self.in_weights[0], self.form), along_n(self.in_weights[1], self.form)
            dgate, dup = steps.gradient_rows(dgate), steps.gradient_rows(dup)
            clear = self.call.clear_rest
            dx = self.form.mm_sum(dgate, w1, dup, w3, self.group_ends, self.dtypes[0], out, clear)
        del self.in_weights
        return dx, dprob

    def _dh(self) -> Tensor:
        """The gradient of h. Frees dout and w2."""
        rows, w2 = self.form.rows(self.dout, self.group_ends), along_n(self.w2, self.form)
        del self.dout, self.w2
        return self.form.mm(rows, w2, self.group_ends, BF16, clear_rest=self.call.clear_rest)

    def gate_and_up(self) -> tuple[Tensor | None, ...]:
        """Gradients of w1 and w3, of b1 and b3; after `inputs`."""
        needs, groups = self.call.needs, self.steps.groups
        x = self.steps.tokens(self.x) if needs.w1 or needs.w3 else None
        del self.steps.glu, self.x
        douts = self.gate_tokens if needs.w1 else None, self.up_tokens if needs.w3 else None
        dw1, dw3 = self.form.wgrad_pair(douts, x, groups.ends, self.dtypes[1:3])
        dgate, dup = self.values
        db1 = bias_gradient(dgate, self.group_ends) if needs.b1 and dgate is not None else None
        db3 = bias_gradient(dup, self.group_ends) if needs.b3 and dup is not None else None
        return dw1, dw3, db1, db3

    def weights(self) -> tuple[Tensor | None, ...]:
        """Gradients of w1, w3 and w2, of b1, b3 and b2; after `inputs`."""
        dw2, db2 = self.down()
        dw1, dw3, db1, db3 = self.gate_and_up()
        return dw1, dw3, dw2, db1, db3, db2


class _SwiGLUFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, prob: Tensor,
        b1: Bias, b3: Bias, b2: Bias, cached: tuple[Cached, Cached, Cached], group_ends: Tensor, call: FFNCall,
    ) -> Tensor:  # fmt: skip
        call = call._replace(needs=FFNNeeds._make(ctx.needs_input_grad[:8]))
        out, saved = ffn_forward(call, x, (w1, w3, w2), prob, Biases(b1, b3, b2), cached, group_ends)
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
    biases: tuple[Bias, Bias, Bias] | None = None,
    activation: SwiGLU = PLAIN,
    recipe: Recipe | str = "mxfp8",
    pad_token_groups: bool = True,
    group_sizes: Tensor | None = None,
) -> Tensor:
    """Compute prob * ((silu(x w1^T + b1) * (x w3^T + b3)) w2^T + b2) for each group of rows.

    The result is differentiable in x, the weights, the biases and prob. A gradient has the dtype of its argument. The
    gradient of the result may be an MXTensor.

    Args:
        x: (P, D) bfloat16 or float32, quantized here, once; or an MXTensor, used as it is. The recipes "bf16" and
            "fp8_..." dequantize an MXTensor.
        w1: (G, F, D), contiguous, bfloat16 or float32; D and F are multiples of 32. Or its QuantizedWeights, whose
            `values` get the gradient; or frozen weights, an MXTensor.
        w3: Like w1.
        w2: (G, D, F), like w1.
        group_ends: (G,) int32 or int64, the end of each group of rows; or the RowMap or Route that laid the rows out,
            which has them. Rows past the last end give zeros.
        prob: (P,) float32, a weight for each row, which multiplies h before it is rounded, and b2. None is 1.
        biases: None, or (b1, b3, b2), each bfloat16, float32 or None. b1 and b3 are (G, F), or (F,) for all groups; b2
            is (G, D) or (D,). They are added to fp32 sums. With b1 or b3 the backward stores the gradients of gate and
            up in bf16 before it quantizes them. With b2 and prob the sums of the last product are stored in fp32.
        activation: A `SwiGLU`, for models that clamp or scale gate and up.
        recipe: As in `grouped_mm`.
        pad_token_groups: As in `grouped_mm`.
        group_sizes: As in `grouped_mm`.

    Returns:
        (P, D) bfloat16.

    Raises:
        ValueError: For shapes, layouts and values of group_ends that are not allowed.
        TypeError: For other dtypes and types.

    Example:
        >>> x, w = torch.ones(1, 32), torch.full((1, 32, 32), 1 / 32)
        >>> grouped_swiglu_ffn(x, w, w, w, torch.tensor([1]))[0, 0].item()  # sigmoid(1) = 0.731, in E4M3 0.75
        0.75
        >>> gpt_oss = SwiGLU(alpha=1.702, limit=7.0, offset=1.0)
        >>> biases = (None, None, torch.ones(32))
        >>> grouped_swiglu_ffn(x, w, w, w, torch.tensor([1]), biases=biases, activation=gpt_oss)[0, 0].item()
        2.75

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    op = "grouped_swiglu_ffn"
    check_flag(op, "pad_token_groups", pad_token_groups)
    weights, of_products = (w1, w3, w2), Biases.check(op, biases)
    save_bytes = all(not isinstance(w, Tensor) or outlives_forward(w) for w in weights)
    ends, known = ends_by_hand(op, group_ends, group_sizes, x, w1)
    options = FFNOptions(Recipe.parse(recipe), activation, pad_token_groups, save_bytes)
    return swiglu_ffn(op, x, weights, ends, prob, of_products, options, known)


@named("mxep.experts")
def swiglu_ffn(
    op: str,
    x: Tensor,
    weights: Sequence[Weights],
    group_ends: Tensor,
    prob: Tensor | None,
    biases: Biases,
    options: FFNOptions,
    known: list[int] | None = None,
) -> Tensor:
    """`grouped_swiglu_ffn` in the name of `op`. known: of `check_group_ends`."""
    check_floats(op, "x", x)
    values, cached, (b1, b3, b2) = check_ffn_weights(op, "x", x, weights, biases, options.recipe)
    weighted, prob = prob is not None, row_probabilities(op, prob, x)
    check_devices(op, "x", x.device, prob=prob)
    call = ffn_call(op, values, x.device, weighted, options)
    remedy = "pass pad_token_groups=True" if call.options.whole_blocks else None
    group_ends = check_group_ends(op, "group_ends", group_ends, x, values[0].shape[0], "x", "w1", remedy, known)
    w1, w3, w2 = values
    return _swiglu_ffn(x, w1, w3, w2, prob, b1, b3, b2, cached, group_ends, call)


def ffn_call(op: str, weights: Sequence[Tensor], device: torch.device, weighted: bool, options: FFNOptions) -> FFNCall:
    """The call of the feed-forward. weighted: `prob` weights b2 too."""
    need_wgrad = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
    numbers = SwiGLU.check(op, options.activation).attributes
    of_products = ProductOptions.of(options.recipe, device, options.pad, need_wgrad)
    return FFNCall(of_products, numbers, weighted, options.save_bytes, options.recompute, options.clear_rest)
