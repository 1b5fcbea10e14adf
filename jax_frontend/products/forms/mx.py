"""The form "mx": E4M3 with one scale per 32 values along the rows and, with `wgrad_mx`, along the tokens.

Hopper's tensor cores take no scales per 32: there an operand is dequantized once, and the products multiply bf16.
"""

from typing import Any, NamedTuple

import jax
from jax.export import register_namedtuple_serialization

from ....core_kernels.formats import Rounding
from ....core_kernels.policy.recipe import Form
from ....core_kernels.policy.swiglu_gradient import Needs, gradient_op
from ... import ops
from ...ops.mx_array import MXArray
from . import form as forms
from .form import MX, Added, FormatType, Glu, Maybe, Operands, SwiGLUGradient, WeightOperands


class Upcast(NamedTuple):
    """MX dequantized to bf16, the operand on sm_90."""

    x: jax.Array


register_namedtuple_serialization(Upcast, serialized_name="mxep.Upcast")


def mx_tokens(x: Any, rounding: Rounding) -> MX:
    """x (M, K) quantized along M."""
    values = x.dequantize() if isinstance(x, MXArray) else forms.floats(x)
    return ops.quantize_col(values, rounding=rounding)


class MXForm(NamedTuple):
    name: Form
    rounding: Rounding
    wgrad_mx: bool
    upcasts: bool

    quantizes = True

    def _multiplied(self, pair: MX) -> MX | Upcast:
        q, sf = pair  # a plain pair, whatever tuple the caller holds: pytrees of weights have one structure
        return Upcast(ops.dequantize(q, sf)) if self.upcasts else (q, sf)

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> MX | Upcast:
        if isinstance(x, Upcast):
            return x
        if isinstance(x, MXArray):
            x = (x.q, x.sf)
        return self._multiplied(x if isinstance(x, tuple) else ops.quantize_row(x, rounding=self.rounding))

    def tokens(self, x: Any, ends: jax.Array) -> Any:
        return self._multiplied(mx_tokens(x, self.rounding)) if self.wgrad_mx else forms.as_bf16(x)

    def gradient(self, dout: Any, ends: jax.Array) -> Operands:
        if not self.wgrad_mx or not isinstance(dout, jax.Array):
            return forms.gradient_unfused(self, dout, ends)
        q, sf, q_t, sf_t = ops.quantize_both(dout, rounding=self.rounding)
        return Operands((q, sf), self._multiplied((q_t, sf_t)))

    def along_rows(self, w: jax.Array) -> MX | Upcast:
        return self.rows(w)

    def along_columns(self, w: jax.Array) -> MX | Upcast:
        return self._multiplied(ops.quantize_col(w, rounding=self.rounding))

    def weights(self, w: jax.Array) -> WeightOperands:
        q, sf, q_t, sf_t = ops.quantize_both(w, rounding=self.rounding)
        return WeightOperands((q, sf), (q_t, sf_t))

    def hidden(self, glu: Glu) -> MX | Upcast:
        gate, up, prob, numbers, _ = glu
        return self._multiplied(ops.swiglu_row(gate, up, prob, self.rounding, False, *numbers))

    def swiglu_backward(self, dh: jax.Array, glu: Glu, need_values: bool) -> SwiGLUGradient:
        gate, up, prob, numbers, ends = glu
        if not self.wgrad_mx:
            return forms.swiglu_unfused(self, dh, glu, need_values)
        if gradient_op(self.name, True, Needs(True, True, need_values, True)) == "swiglu_bwd":
            dgate, dup, dprob = glu.gradient(dh)
            operands = self.gradient(dgate, ends), self.gradient(dup, ends)
            hidden = self._multiplied(ops.swiglu_col(gate, up, prob, self.rounding, False, *numbers))
            return SwiGLUGradient(operands[0], operands[1], hidden, dprob, (dgate, dup))
        *found, dprob = ops.swiglu_bwd_all(dh, gate, up, prob, self.rounding, False, *numbers)
        gate, gate_t, up, up_t, hidden = zip(found[::2], found[1::2], strict=True)
        gate_t, up_t, hidden = map(self._multiplied, (gate_t, up_t, hidden))
        return SwiGLUGradient(Operands(gate, gate_t), Operands(up, up_t), hidden, dprob)

    def mm(
        self, rows: Any, w: Any, ends: jax.Array, dtype: Any, bias: Added = None, clear_rest: bool = False
    ) -> jax.Array:
        if bias is not None:
            return forms.bias_unfused(self, rows, w, ends, dtype, bias, clear_rest)
        # QuantizedWeights may be for another device than this program: an Upcast on one side makes the product bf16.
        if self.upcasts or isinstance(w, Upcast):
            return ops.grouped_mm_bf16(_as_bf16(rows), _as_bf16(w), ends, dtype, clear_rest)
        return ops.grouped_mm_mx(rows[0], rows[1], w[0], w[1], ends, dtype, clear_rest)

    def wgrad(self, dout: Any, x: Any, ends: jax.Array, dtype: Any) -> jax.Array:
        if not self.wgrad_mx:
            return forms.wgrad_bf16(self, dout, x, ends, dtype)
        if self.upcasts:
            return ops.grouped_wgrad_bf16_t(dout.x, x.x, ends, out_dtype=dtype)
        return ops.grouped_wgrad_mx(dout[0], dout[1], x[0], x[1], ends, out_dtype=dtype)

    mm_pair, mm_sum, wgrad_pair = forms.pair_unfused, forms.sum_unfused, forms.wgrads_unfused
    saved, activation = forms.without_source, forms.rows_alone


def _as_bf16(x: MX | Upcast) -> jax.Array:
    return x.x if isinstance(x, Upcast) else forms.as_bf16(x)


FORM: FormatType = MXForm
