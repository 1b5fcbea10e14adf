"""The feed-forward of experts whose gate and up are one tensor, without a copy of the weights.

    stored                        gate and up        products forward          products of dx
    (E, 2F, D)                    halves             two, of views             two, one sum: the bytes of two weights
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

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.policy.swiglu_gradient import Needs, gradient_op
from ...core_kernels.swiglu.activation import Numbers, SwiGLU
from ..ops.checks import check_bias, check_floats, check_group_ends
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.launch import at_address, check_devices
from ..ops.ranges import named
from ..products.backward_operands import BackwardOperands
from ..products.forms.fold import Folded
from ..products.forms.form import AddedBias, Glu, Operands
from ..products.forms.mx import MX
from ..products.products import ProductOptions, bias_gradient
from ..products.swiglu import row_probabilities
from ..products.weights import along_n, check_weights, format_of, outlives_forward, quantize_for_call
from .layouts import joined

BF16 = torch.bfloat16


class PackedNeeds(NamedTuple):
    """Which arguments need gradients."""

    x: bool = False
    gate_up: bool = False
    down: bool = False
    prob: bool = False
    gate_up_bias: bool = False
    down_bias: bool = False

    @property
    def dh(self) -> bool:
        return self.x or self.gate_up or self.prob or self.gate_up_bias


class PackedCall(NamedTuple):
    """The arguments of one call other than tensors.

    Attributes:
        numbers: of the activation.
        save_bytes: the quantized weights may live until the backward.
        transposed: the layout.
        interleaved: the layout.
        separate: gate and up are products of their own.
    """

    options: ProductOptions
    numbers: Numbers
    save_bytes: bool
    transposed: bool
    interleaved: bool
    separate: bool
    needs: PackedNeeds = PackedNeeds()

    def weights(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """(E, 2F, D), or (2E, F, D) if separate, and (E, D, F), views of the weights as stored."""
        if self.separate:
            return gate_up.view(-1, gate_up.shape[1] // 2, gate_up.shape[2]), down
        return (gate_up.mT, down.mT) if self.transposed else (gate_up, down)

    def weight_gradient(self, dout: Any, x: Any, ends: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of a weight, as it is stored."""
        first, second = (x, dout) if self.transposed else (dout, x)
        return self.options.form.wgrad(first, second, ends, dtype)


class PackedSaved(NamedTuple):
    """What the backward reads: x or its tokens; gate_up and down, as `PackedCall.weights` has them, or their operands
    along N."""

    x: Any
    gate_up: Any
    down: Any
    group_ends: Tensor
    gate: Tensor
    up: Tensor
    prob: Tensor


class _PackedFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, prob: Tensor, gate_up_bias: Tensor | None,
        down_bias: Tensor | None, group_ends: Tensor, call: PackedCall,
    ) -> Tensor:  # fmt: skip
        needs, form = PackedNeeds._make(ctx.needs_input_grad[:6]), call.options.form
        ctx.dtypes, ctx.call = (x.dtype, gate_up.dtype, down.dtype), call._replace(needs=needs)
        gate_up, down = call.weights(gate_up, down)
        rows, tokens = form.activation(x, group_ends, call.options.whole_blocks and needs.gate_up)
        first = quantize_for_call(gate_up, None, form, needs.x and call.save_bytes)
        last = quantize_for_call(down, None, form, needs.dh and call.save_bytes)
        if call.separate:
            gates, ups = _gates_and_ups(first.along_k)
            gate, up = form.mm_pair(rows, gates, ups, _ends_of_pairs(group_ends), BF16, clear_rest=True)
        else:
            added = None if gate_up_bias is None else AddedBias(gate_up_bias)
            gate, up = _split(form.mm(rows, first.along_k, group_ends, BF16, added, clear_rest=True), call.interleaved)
        saved = PackedSaved(
            x=(tokens or x) if needs.gate_up else None,
            gate_up=(first.along_n or gate_up) if needs.x else None,
            down=(last.along_n or down) if needs.dh else None,
            group_ends=group_ends,
            gate=gate,
            up=up,
            prob=prob,
        )
        save(ctx, saved)
        h = form.hidden(Glu(gate, up, prob, call.numbers, group_ends))
        added = None if down_bias is None else AddedBias(down_bias)
        return form.mm(h, last.along_k, group_ends, BF16, added, clear_rest=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: PackedCall = ctx.call
        x, gate_up, down, ends, gate, up, prob = saved_by(ctx)
        steps = BackwardOperands(call.options, Glu(gate, up, prob, call.numbers, ends))
        del gate, up
        needs, form, dout = call.needs, call.options.form, grads[0]
        dx = dgate_up = ddown = dprob = dbias = found = None
        rows, tokens = steps.both(dout, form.gradient) if needs.down else Operands(dout)
        if needs.dh:
            steps.dh = form.mm(form.rows(rows, ends), along_n(down, form), ends, BF16, clear_rest=True)
            found = _swiglu_gradient(call, steps)
            dprob = found.dprob
        if needs.down:
            ddown = call.weight_gradient(tokens, steps.hidden_tokens(), ends, ctx.dtypes[2])
        if found and needs.x:
            dx = _input_gradient(call, steps, found, along_n(gate_up, form), ctx.dtypes[0])
        if found and needs.gate_up:
            dgate_up = call.weight_gradient(steps.tokens(found.tokens), steps.tokens(x), ends, ctx.dtypes[1])
        if found and needs.gate_up_bias:
            dbias = bias_gradient(found.values, ends)
        ddown_bias = bias_gradient(dout, ends) if needs.down_bias else None
        return dx, dgate_up, ddown, dprob, dbias, ddown_bias, None, None


def _ends_of_pairs(group_ends: Tensor) -> Tensor:
    return group_ends.repeat_interleave(2)[:-1]


def _gates_and_ups(pairs: Any) -> tuple[Any, Any]:
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
    """Of gate and up: rows, two if separate, else joined; tokens, joined, not in the form yet; joined values in bf16.
    Any is None, or may be, if nothing needs it."""

    dprob: Tensor
    rows: Any
    tokens: Any
    values: Any = None


def _swiglu_gradient(call: PackedCall, steps: BackwardOperands) -> _Gradient:
    needs, form = call.needs, call.options.form
    of_swiglu = Needs(needs.x, needs.gate_up, needs.gate_up_bias or call.interleaved, needs.down)
    if call.separate:
        dprob, gate, up, gate_t, up_t, _ = form.swiglu_backward(steps, of_swiglu)
        return _Gradient(dprob, (gate, up), _joined_tokens(gate_t, up_t) if needs.gate_up else None)
    # Rows with one scale each cannot be joined, and a block of 32 columns may have columns of both.
    op = gradient_op("mx" if form.name == "fold" else form.name, steps.quantized_tokens, of_swiglu)
    if op == "swiglu_bwd":
        dgate, dup, dprob = steps.values()
        values = joined(dgate, dup, call.interleaved)
        rows, tokens = steps.both(values, form.gradient) if needs.x and needs.gate_up else (values, values)
        return _Gradient(dprob, rows, tokens, values)
    dprob, gate, up, gate_t, up_t, _ = steps.quantized(op)
    rows = MX(torch.cat([gate.q, up.q], 1), torch.cat([gate.sf, up.sf], 1)) if needs.x else None
    return _Gradient(dprob, rows, _joined_tokens(gate_t, up_t) if needs.gate_up else None)


def _joined_tokens(gate: Any, up: Any) -> Any:
    """Operands of gate and up along the tokens -> one of 2F features."""
    if isinstance(gate, Tensor):
        return joined(gate, up, False)
    if isinstance(gate, Folded):  # scales (spans, F)
        return Folded(torch.cat([gate.q, up.q]), torch.cat([gate.sf, up.sf], 1))
    return gate._make(map(torch.cat, zip(gate, up, strict=True)))


def _input_gradient(
    call: PackedCall, steps: BackwardOperands, found: _Gradient, gate_up: Any, dtype: torch.dtype
) -> Tensor:
    form, ends = call.options.form, steps.groups.ends
    if not call.separate:
        return form.mm(form.rows(found.rows, ends), gate_up, ends, dtype, clear_rest=True)
    (gates, ups), (dgate, dup) = _gates_and_ups(gate_up), map(steps.gradient_rows, found.rows)
    return form.mm_sum(dgate, gates, dup, ups, _ends_of_pairs(ends), dtype, clear_rest=True)


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

    Args:
        op: the function that an error names.
        x: (P, D) bf16, fp32 or an MXTensor.
        gate_up: (E, 2F, D), or (E, D, 2F) if transposed; contiguous, bf16 or fp32.
        down: (E, D, F), or (E, F, D) if transposed; contiguous, bf16 or fp32.
        group_ends: (E,) integers, the end of each group; multiples of 32 if a weight gradient quantizes the tokens.
        recipe: of the products.
        activation: a `SwiGLU`.
        prob: (P,) fp32, not with down_bias, which it would not weigh.
        gate_up_bias: (E, 2F) bf16 or fp32; or None.
        down_bias: (E, D) bf16 or fp32; or None.
        transposed: the layout of both weights.
        interleaved: gate is at even indices of 2F, up at odd ones. Otherwise gate is first, then up.

    Returns:
        (P, D) bf16, zeros past the last end.

    Raises:
        ValueError: as `grouped_swiglu_ffn`.
        TypeError: as `grouped_swiglu_ffn`.
    """
    assert prob is None or down_bias is None
    check_floats(op, "hidden_states", x)
    named_weights = {"gate_up_proj": gate_up, "down_proj": down}
    for name, w in named_weights.items():
        check_weights(op, name, w, format_of(recipe, x.device), recipe.rounding)
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
    group_ends = check_group_ends(op, "group_ends", group_ends, x, experts, "hidden_states", "down_proj", remedy)
    save_bytes = all(map(outlives_forward, named_weights.values()))
    separate = not transposed and not interleaved and gate_up_bias is None
    call = PackedCall(options, activation.attributes, save_bytes, transposed, interleaved, separate)
    return _packed_ffn(x, gate_up, down, prob, gate_up_bias, down_bias, group_ends, call)
