"""The form "bf16": nothing is quantized, and both products read weights (G, N, K) as they are stored."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core_kernels.policy.recipe import Form
from . import form as forms
from .form import Added, DType, FormatType, Glu, Maybe, WeightOperands


class KN(NamedTuple):
    """Weights (G, K, N) of a product over K: a linear layer's (G, N, K), as stored, in its input gradient."""

    w: Tensor


class BF16Form(NamedTuple):
    name: Form
    rounding: int
    wgrad_mx: bool
    upcasts: bool

    quantizes = False

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Tensor:
        return forms.as_bf16(x)

    def along_k(self, w: Tensor) -> Tensor:
        return w.to(torch.bfloat16)

    def along_n(self, w: Tensor) -> KN:
        return KN(w.to(torch.bfloat16).contiguous())

    def weights(self, w: Tensor) -> WeightOperands:
        return WeightOperands(self.along_k(w), self.along_n(w))

    def hidden(self, glu: Glu) -> Tensor:
        return glu.hidden()

    def mm(
        self, rows: Any, w: Any, ends: Tensor, dtype: DType, bias: Added = None, out: Maybe = None,
        clear_rest: bool = False,
    ) -> Tensor:  # fmt: skip
        if bias is not None:
            return forms.bias_unfused(self, rows, w, ends, dtype, bias, out, clear_rest)
        if isinstance(w, KN):
            return forms.written("grouped_mm_bf16_kn", (rows, w.w, ends), dtype, out, clear_rest)
        return forms.written("grouped_mm_bf16", (rows, w, ends), dtype, out, clear_rest)

    def mm_sum(
        self, rows: Any, w: Any, rows2: Any, w2: Any, ends: Tensor, dtype: DType, out: Maybe = None,
        clear_rest: bool = False,
    ) -> Tensor:  # fmt: skip
        if isinstance(w, KN) and isinstance(w2, KN):
            return forms.written("grouped_mm_bf16_kn_sum", (rows, w.w, rows2, w2.w, ends), dtype, out, clear_rest)
        return forms.sum_unfused(self, rows, w, rows2, w2, ends, dtype, out, clear_rest)

    mm_pair = forms.pair_unfused
    tokens, activation, gradient = forms.as_given, forms.rows_alone, forms.share_gradient
    wgrad, wgrad_pair, swiglu_backward = forms.wgrad_bf16, forms.wgrads_unfused, forms.swiglu_unfused


FORM: FormatType = BF16Form
