"""The form "row": E4M3 with one scale per row, multiplied as folded operands are. It quantizes no tokens."""

from typing import Any, NamedTuple

import jax

from ....core_kernels.formats import Rounding
from ....core_kernels.policy.recipe import Form
from ... import ops
from . import form as forms
from .fold import Folded, folded_mm, folded_pair, folded_sum
from .form import FormatType, Glu, Maybe, WeightOperands


class RowForm(NamedTuple):
    name: Form
    rounding: Rounding
    wgrad_mx: bool
    upcasts: bool

    quantizes = True

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Folded:
        if isinstance(x, Folded):
            return x
        return Folded(*ops.quantize_rowwise(forms.floats(x), ends, rounding=self.rounding))

    def along_rows(self, w: jax.Array) -> Folded:
        return self.rows(w)

    def along_columns(self, w: jax.Array) -> Folded:
        return self.rows(w.mT)

    def weights(self, w: jax.Array) -> WeightOperands:
        return WeightOperands(self.along_rows(w), self.along_columns(w))

    def hidden(self, glu: Glu) -> Folded:
        return self.rows(glu.hidden(), glu.ends)

    mm, mm_pair, mm_sum = folded_mm, folded_pair, folded_sum
    wgrad, wgrad_pair, gradient = forms.wgrad_bf16, forms.wgrads_unfused, forms.gradient_unfused
    tokens, saved, activation = forms.bf16_tokens, forms.without_source, forms.rows_alone
    swiglu_backward = forms.swiglu_unfused


FORM: FormatType = RowForm
