"""The form "row": E4M3 with one scale per row, multiplied as folded operands are. It quantizes no tokens."""

from typing import Any, NamedTuple

from torch import Tensor

from ....core_kernels.policy.recipe import Form
from ...ops import direct as ops
from ...ops.mx_tensor import dequantized
from . import form as forms
from .fold import Folded, folded_mm, folded_pair, folded_sum
from .form import FormatType, Glu, Maybe, WeightOperands


class RowForm(NamedTuple):
    name: Form
    rounding: int
    wgrad_mx: bool
    upcasts: bool

    quantizes = True

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Folded:
        if isinstance(x, Folded):
            return x
        return Folded(*ops.quantize_rowwise(dequantized(x).contiguous(), ends, self.rounding))

    def along_k(self, w: Tensor) -> Folded:
        return self.rows(w)

    def along_n(self, w: Tensor) -> Folded:
        return self.rows(w.mT)

    def weights(self, w: Tensor) -> WeightOperands:
        return WeightOperands(self.along_k(w), self.along_n(w))

    def hidden(self, glu: Glu) -> Folded:
        return self.rows(glu.hidden(), glu.ends)

    mm, mm_pair, mm_sum = folded_mm, folded_pair, folded_sum
    tokens, activation, gradient = forms.as_given, forms.rows_alone, forms.share_gradient
    wgrad, wgrad_pair, swiglu_backward = forms.wgrad_bf16, forms.wgrads_unfused, forms.swiglu_unfused


FORM: FormatType = RowForm
