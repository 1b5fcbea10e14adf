"""The feed-forward of experts whose gate and up are one tensor, without a copy of the weights.

    stored                        gate and up        products forward          products of dx
    (E, 2F, D)                    halves             two, of views             two, one sum: the bytes of weights apart
    (E, D, 2F), or with biases    halves, or every   one of 2F columns, split  one of 2F columns
                                  other column

(E, 2F, D) is (2E, F, D): gate of expert 0, up of expert 0, gate of expert 1, ...
    gates   the first 2E - 1 of them     ends e0 e0 e1 e1 ...: the rows of expert e are group 2e, odd groups are empty
    ups     the last 2E - 1 of them      the same ends: up of expert e is group 2e here

Between the products all layouts do what ffn.py does: gate and up are saved, h is never stored, and its gradient is
quantized where it is computed. Every other column needs dgate and dup in bf16 before they are joined, since a block of
32 columns has both; so does a gradient of the bias. The gradient of gate_up is one product of both, joined.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from ..core_kernels.swiglu.activation import SwiGLU
from . import _direct as ops
from ._checks import check_bias, check_floats, check_group_ends
from ._differentiable import differentiable, save, saved_by
from ._launch import at_address, check_devices
from ._ranges import named
from .layouts import joined
from .products import (
    Operand,
    ProductOptions,
    bias_gradient,
    gradient_rows,
    is_mx,
    output_gradient_operands,
    pair_of_products,
    product,
    quantize_activation,
    row_operand,
    sum_of_products,
    token_operand,
    weight_gradient,
)
from .swiglu import hidden_rows, row_probabilities
from .weights import MX, Folded, WeightOperand, along_n, check_weights, for_call, form_of, outlives_forward

BF16 = torch.bfloat16


class PackedCall(NamedTuple):
    """What one call has beside its tensors.

    numbers: of the activation. save_bytes: the quantized weights may live until the backward. transposed, interleaved:
    the layout. apart: gate and up are products of their own.
    """

    options: ProductOptions
    numbers: tuple[float, float, float]
    save_bytes: bool
    transposed: bool
    interleaved: bool
    apart: bool

    def weights(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """(E, 2F, D), or (2E, F, D) if apart, and (E, D, F), views of the weights as stored."""
        if self.apart:
            return gate_up.view(-1, gate_up.shape[1] // 2, gate_up.shape[2]), down
        return (gate_up.mT, down.mT) if self.transposed else (gate_up, down)

    def weight_gradient(self, dout: Operand, x: Operand, ends: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of a weight, as it is stored."""
        return weight_gradient(*((x, dout) if self.transposed else (dout, x)), ends, dtype)


class _PackedFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, prob: Tensor, gate_up_bias: Tensor | None,
        down_bias: Tensor | None, group_ends: Tensor, call: PackedCall,
    ) -> Tensor:  # fmt: skip
        form, rounding, *_ = options = call.options
        need_x, need_gate_up, _, need_prob, need_bias, _ = ctx.needs_input_grad[:6]
        ctx.dtypes, ctx.call = (x.dtype, gate_up.dtype, down.dtype), call
        need_dh = need_x or need_gate_up or need_prob or need_bias
        gate_up, down = call.weights(gate_up, down)
        need_tokens = options.whole_blocks and need_gate_up
        rows, tokens = quantize_activation(x, form, rounding, group_ends if need_tokens else None)
        first, first_n = for_call(gate_up, None, form, rounding, need_x and call.save_bytes)
        last, last_n = for_call(down, None, form, rounding, need_dh and call.save_bytes)
        if call.apart:
            gate, up = pair_of_products(rows, _gates_and_ups(first), _ends_of_pairs(group_ends), BF16)
        else:
            gate, up = _split(product(rows, first, group_ends, BF16, gate_up_bias), call.interleaved)
        glu = gate, up, prob
        h = hidden_rows(*glu, form, rounding, call.numbers)
        weights = (first_n or gate_up) if need_x else None, (last_n or down) if need_dh else None
        save(ctx, ((tokens or x) if need_gate_up else None, weights, group_ends, glu))
        return product(row_operand(h, form, rounding), last, group_ends, BF16, down_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, (first, last), group_ends, glu = saved_by(ctx)
        need_x, need_gate_up, need_down, need_prob, need_bias, need_down_bias = ctx.needs_input_grad[:6]
        call: PackedCall = ctx.call
        (form, rounding, wgrad_mx, *_), numbers = call.options, call.numbers
        dx = dgate_up = ddown = dprob = dbias = None

        def rows(operand: Any) -> Operand:
            return row_operand(operand, form, rounding)

        def tokens(operand: Any) -> Operand:
            return token_operand(operand, form, rounding, group_ends) if wgrad_mx else operand

        dout: Any = grads[0]
        ddown_bias = bias_gradient(dout, group_ends) if need_down_bias else None
        dout_tokens, of = dout, None
        if need_down and wgrad_mx:
            dout, dout_tokens = output_gradient_operands(dout, form, rounding, group_ends)
        if need_x or need_gate_up or need_prob or need_bias:
            last_n = along_n(last, form, rounding) if isinstance(last, Tensor) else last
            dh = product(rows(dout), last_n, group_ends, BF16)
            of = _swiglu_gradient(dh, glu, call, group_ends, need_x, need_gate_up, need_bias, need_down)
        if need_down:
            h_tokens: Any = of.hidden if of else None
            if h_tokens is None:
                h_tokens = (
                    MX(*ops.swiglu_col(*glu, rounding, False, *numbers)) if wgrad_mx else ops.swiglu(*glu, *numbers)
                )
            ddown = call.weight_gradient(dout_tokens, tokens(h_tokens), group_ends, ctx.dtypes[2])
        if of:
            dprob = of.dprob
            if need_x:
                first_n = along_n(first, form, rounding) if isinstance(first, Tensor) else first
                if call.apart:
                    gates, ups = _gates_and_ups(first_n)
                    dgate, dup = (gradient_rows(x, form, rounding) for x in of.rows)
                    dx = sum_of_products(dgate, gates, dup, ups, _ends_of_pairs(group_ends), ctx.dtypes[0])
                else:
                    dx = product(rows(of.rows), first_n, group_ends, ctx.dtypes[0])
            if need_gate_up:
                dgate_up = call.weight_gradient(tokens(of.tokens), tokens(x), group_ends, ctx.dtypes[1])
            if need_bias:
                dbias = bias_gradient(of.values, group_ends)
        return dx, dgate_up, ddown, dprob, dbias, ddown_bias, None, None


def _ends_of_pairs(group_ends: Tensor) -> Tensor:
    return group_ends.repeat_interleave(2)[:-1]


def _gates_and_ups(pairs: WeightOperand) -> tuple[Any, Any]:
    """The views of an operand of (2E, F, D) in which group 2e is the gate, or the up, of expert e."""
    if isinstance(pairs, Tensor):
        return pairs[:-1], pairs[1:]
    return pairs._make(t[:-1] for t in pairs), pairs._make(at_address(t[1:]) for t in pairs)


def _split(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """gate_up (P, 2F) -> gate and up (P, F), contiguous, in one pass."""
    rows, f = gate_up.shape[0], gate_up.shape[1] // 2
    parts = gate_up.view(rows, f, 2).permute(2, 0, 1) if interleaved else gate_up.view(rows, 2, f).transpose(0, 1)
    gate, up = parts.contiguous()
    return gate, up


class _Gradient(NamedTuple):
    """Of gate and up: the row operands, a pair if apart, else joined; joined the operand along the tokens and the
    values in bf16. Any is None, or may be, if nothing needs it."""

    rows: Any
    tokens: Any
    values: Any
    dprob: Tensor
    hidden: MX | Folded | None = None


def _swiglu_gradient(
    dh: Tensor, glu: tuple[Tensor, ...], call: PackedCall, group_ends: Tensor, need_rows: bool, need_tokens: bool,
    need_values: bool, need_hidden: bool,
) -> _Gradient:  # fmt: skip
    """MX where the kernel of SwiGLU quantizes them, Folded where it folds them too, values where no kernel does; h
    along the tokens where the same kernel writes it."""
    options, arguments = call.options, (dh, *glu, call.options.rounding, False, *call.numbers)

    def rows_of(q: Tensor, sf: Tensor, q_up: Tensor, sf_up: Tensor) -> Any:
        if call.apart:
            return MX(q, sf), MX(q_up, sf_up)
        return MX(torch.cat([q, q_up], 1), torch.cat([sf, sf_up], 1))

    if is_mx(options.form) and not (call.interleaved or need_values):
        if options.wgrad_mx and need_tokens and need_rows and need_hidden and call.apart and options.form == "fold":
            *parts, dprob = ops.swiglu_bwd_fold(*arguments[:4], group_ends, *arguments[4:])
            gate, gate_t, up, up_t, hidden = (Folded(*parts[i : i + 2]) for i in range(0, 10, 2))
            tokens = Folded(torch.cat([gate_t.q, up_t.q]), torch.cat([gate_t.sf, up_t.sf], 1))
            return _Gradient((gate, up), tokens, None, dprob, hidden)
        if options.wgrad_mx and need_tokens and need_rows:
            op = ops.swiglu_bwd_all if need_hidden else ops.swiglu_bwd_both
            q, sf, q_t, sf_t, q_up, sf_up, q_up_t, sf_up_t, *hidden, dprob = op(*arguments)
            tokens = MX(torch.cat([q_t, q_up_t]), torch.cat([sf_t, sf_up_t]))
            return _Gradient(rows_of(q, sf, q_up, sf_up), tokens, None, dprob, MX(*hidden) if hidden else None)
        if options.wgrad_mx and need_tokens:
            q_t, sf_t, q_up_t, sf_up_t, dprob = ops.swiglu_bwd_col(*arguments)
            return _Gradient(None, MX(torch.cat([q_t, q_up_t]), torch.cat([sf_t, sf_up_t])), None, dprob)
        if not need_tokens and need_rows:
            *quantized, dprob = ops.swiglu_bwd_row(*arguments)
            return _Gradient(rows_of(*quantized), None, None, dprob)
    dgate, dup, dprob = ops.swiglu_bwd(dh, *glu, *call.numbers)
    if call.apart:
        return _Gradient((dgate, dup), joined(dgate, dup, False) if need_tokens else None, None, dprob)
    values = joined(dgate, dup, call.interleaved)
    if options.wgrad_mx and need_tokens and need_rows:
        operands = output_gradient_operands(values, options.form, options.rounding, group_ends)
        return _Gradient(*operands, values, dprob)
    return _Gradient(values, values, values, dprob)


_packed_ffn = differentiable("packed_ffn", _PackedFFN)


@named("mxep.experts")
def packed_ffn(
    op: str,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    group_ends: Tensor,
    recipe: Recipe,
    activation: SwiGLU,
    *,
    prob: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """prob * (silu(gate) * up) down^T for each group of rows, in the name of `op`; differentiable in the tensors.

    x: (P, D) bf16, fp32 or an MXTensor. gate_up: (E, 2F, D), or (E, D, 2F) if transposed, gate then up, or gate at even
    places of 2F if interleaved; down: (E, D, F), or (E, F, D); contiguous, bf16 or fp32. gate_up_bias (E, 2F),
    down_bias (E, D): bf16 or fp32. group_ends: (E,); multiples of 32 if a weight gradient quantizes the tokens. prob:
    (P,) fp32, not with down_bias, which it would not weigh. Returns (P, D) bf16, zeros past the last end. Raises
    ValueError and TypeError as `grouped_swiglu_ffn` does.
    """
    assert prob is None or down_bias is None
    check_floats(op, "hidden_states", x)
    named_weights = {"gate_up_proj": gate_up, "down_proj": down}
    for name, w in named_weights.items():
        check_weights(op, name, w, form_of(recipe, x.device), recipe.rounding)
        if not w.is_contiguous():
            fail(ValueError, op, name, f"strides {w.stride()}", "allowed: contiguous weights")
    experts, d, f = down.mT.shape if transposed else down.shape
    shape = (experts, d, 2 * f) if transposed else (experts, 2 * f, d)
    if gate_up.shape != shape:
        got, allowed = f"shape {tuple(gate_up.shape)}", f"allowed: {shape}, by down_proj's {tuple(down.shape)}"
        fail(ValueError, op, "gate_up_proj", got, allowed)
    if x.shape[1] != d:
        fail(ValueError, op, "hidden_states", f"shape {tuple(x.shape)}", f"allowed: (P, {d})")
    for name, size in (("F", f), ("D", d)):
        if size % BLOCK:
            fail(ValueError, op, "down_proj", f"{name} = {size}", f"allowed: multiples of {BLOCK}")
    prob = row_probabilities(op, prob, x)
    check_devices(op, "hidden_states", x.device, prob=prob, **named_weights)
    if gate_up_bias is not None:
        gate_up_bias = check_bias(op, "gate_up_proj_bias", gate_up_bias, experts, 2 * f, x.device)
    if down_bias is not None:
        down_bias = check_bias(op, "down_proj_bias", down_bias, experts, d, x.device)
    need_wgrad = torch.is_grad_enabled() and any(w.requires_grad for w in named_weights.values())
    options = ProductOptions.of(recipe, x.device, False, need_wgrad)
    remedy = "pad the groups" if options.whole_blocks else None
    of_ends = "group_ends", group_ends, x, experts, "hidden_states", "down_proj"
    group_ends = check_group_ends(op, *of_ends, remedy)
    save_bytes = all(map(outlives_forward, named_weights.values()))
    apart = not transposed and not interleaved and gate_up_bias is None
    call = PackedCall(options, activation.attributes, save_bytes, transposed, interleaved, apart)
    return _packed_ffn(x, gate_up, down, prob, gate_up_bias, down_bias, group_ends, call)
