"""The forms "block" and "block_power_of_two": E4M3 with one fp32 scale per 128 values of a row, and per 128 x 128 of a
weight, whose bytes serve both products. With `wgrad_mx` tokens are folded as in form "fold", and made in the same read
as rows."""

from typing import Any, NamedTuple

import jax
from jax.export import register_namedtuple_serialization

from ....core_kernels.formats import Rounding
from ....core_kernels.policy.recipe import Form
from ... import ops
from . import form as forms
from .fold import Folded, folded_wgrad, folded_wgrad_pair
from .form import Added, FormatType, Glu, Maybe, Operands, SwiGLUGradient, WeightOperands
from .mx import mx_tokens


class Blockwise(NamedTuple):
    """E4M3 bytes q (M, K) with one fp32 scale per 128 values, sf (M, K/128); of weights q (G, N, K) with one per 128 x
    128 values, sf (G, N/128, K/128)."""

    q: jax.Array
    sf: jax.Array


register_namedtuple_serialization(Blockwise, serialized_name="mxep.Blockwise")


class BlockForm(NamedTuple):
    name: Form
    rounding: Rounding
    wgrad_mx: bool
    upcasts: bool

    quantizes = True

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Blockwise:
        if isinstance(x, Blockwise):
            return x
        return Blockwise(*ops.quantize_blockwise(forms.floats(x), ends, power_of_two=self._power_of_two))

    def tokens(self, x: Any, ends: jax.Array) -> Any:
        if not self.wgrad_mx:
            return forms.as_bf16(x)
        q, sf = mx_tokens(x, self.rounding)
        return Folded(*ops.fold_groups(q, sf, ends))

    def activation(self, x: Any, ends: jax.Array) -> Operands:
        if not self.wgrad_mx:
            return Operands(self.rows(x, ends))
        q, sf, q_t, sf_t = ops.quantize_blockwise_fold(forms.floats(x), ends, power_of_two=self._power_of_two)
        return Operands(Blockwise(q, sf), Folded(q_t, sf_t))

    def gradient(self, dout: Any, ends: jax.Array) -> Operands:
        return self.activation(dout, ends) if self.wgrad_mx else forms.gradient_unfused(self, dout, ends)

    def along_rows(self, w: jax.Array) -> Blockwise:
        return Blockwise(*ops.quantize_squares(w, power_of_two=self._power_of_two))

    def along_columns(self, w: jax.Array) -> Blockwise:
        return self.weights(w).transposed

    def weights(self, w: jax.Array) -> WeightOperands:
        q, sf, q_t, sf_t = ops.quantize_squares_both(w, power_of_two=self._power_of_two)
        return WeightOperands(Blockwise(q, sf), Blockwise(q_t, sf_t))

    def hidden(self, glu: Glu) -> Blockwise:
        gate, up, prob, numbers, ends = glu
        return Blockwise(*ops.swiglu_blockwise(gate, up, prob, ends, self._power_of_two, *numbers))

    def swiglu_backward(self, dh: jax.Array, glu: Glu, need_values: bool) -> SwiGLUGradient:
        if not self.wgrad_mx:
            return forms.swiglu_unfused(self, dh, glu, need_values)
        gate, up, prob, numbers, ends = glu
        values = glu.gradient(dh)[:2] if need_values else (None, None)
        q, sf, q2, sf2 = ops.swiglu_blockwise_bwd(dh, gate, up, prob, ends, self._power_of_two, *numbers)
        # Its folded rows are not read: 2 bytes per value. From dgate and dup in bf16 it would be 8 more.
        *found, dprob = ops.swiglu_bwd_fold(dh, gate, up, prob, ends, self.rounding, False, *numbers)
        _, gate_t, _, up_t, hidden = map(Folded, found[::2], found[1::2])
        rows = Blockwise(q, sf), Blockwise(q2, sf2)
        return SwiGLUGradient(Operands(rows[0], gate_t), Operands(rows[1], up_t), hidden, dprob, values)

    def mm(
        self, rows: Any, w: Any, ends: jax.Array, dtype: Any, bias: Added = None, clear_rest: bool = False
    ) -> jax.Array:
        if bias is not None:
            return forms.bias_unfused(self, rows, w, ends, dtype, bias, clear_rest)
        return ops.grouped_mm_blockwise(rows.q, rows.sf, w.q, w.sf, ends, dtype, clear_rest)

    def mm_sum(
        self, rows: Blockwise, w: Blockwise, rows2: Blockwise, w2: Blockwise, ends: jax.Array, dtype: Any,
        clear_rest: bool = False,
    ) -> jax.Array:  # fmt: skip
        return ops.grouped_mm_blockwise_sum(*rows, *w, *rows2, *w2, ends, dtype, clear_rest)

    @property
    def _power_of_two(self) -> bool:
        return self.name == "block_power_of_two"

    mm_pair, saved = forms.pair_unfused, forms.without_source
    wgrad, wgrad_pair = folded_wgrad, folded_wgrad_pair


FORM: FormatType = BlockForm
