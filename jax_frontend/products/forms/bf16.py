"""The form "bf16": nothing is quantized, and both products read weights as they are stored."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....core_kernels.formats import Rounding
from ....core_kernels.policy.recipe import Form
from ... import ops
from . import form as forms
from .form import Added, FormatType, Glu, Maybe, WeightOperands


class KN(NamedTuple):
    """Weights (G, K, N) of a product over K: a linear layer's (G, N, K), as stored, in its input gradient."""

    w: jax.Array


class BF16Form(NamedTuple):
    name: Form
    rounding: Rounding
    wgrad_mx: bool
    upcasts: bool

    quantizes = False

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> jax.Array:
        return forms.as_bf16(x)

    def along_rows(self, w: jax.Array) -> jax.Array:
        return w.astype(jnp.bfloat16)

    def along_columns(self, w: jax.Array) -> KN:
        return KN(w.astype(jnp.bfloat16))

    def weights(self, w: jax.Array) -> WeightOperands:
        return WeightOperands(self.along_rows(w), self.along_columns(w))

    def hidden(self, glu: Glu) -> jax.Array:
        return glu.hidden()

    def mm(
        self, rows: Any, w: Any, ends: jax.Array, dtype: Any, bias: Added = None, clear_rest: bool = False
    ) -> jax.Array:
        if bias is not None:
            return forms.bias_unfused(self, rows, w, ends, dtype, bias, clear_rest)
        if isinstance(w, KN):
            return ops.grouped_mm_bf16_kn(rows, w.w, ends, dtype, clear_rest)
        return ops.grouped_mm_bf16(rows, w, ends, dtype, clear_rest)

    def mm_sum(
        self, rows: Any, w: Any, rows2: Any, w2: Any, ends: jax.Array, dtype: Any, clear_rest: bool = False
    ) -> jax.Array:
        if isinstance(w, KN):
            return ops.grouped_mm_bf16_kn_sum(rows, w.w, rows2, w2.w, ends, dtype, clear_rest)
        return forms.sum_unfused(self, rows, w, rows2, w2, ends, dtype, clear_rest)

    mm_pair, wgrad, wgrad_pair = forms.pair_unfused, forms.wgrad_bf16, forms.wgrads_unfused
    tokens, saved, activation = forms.bf16_tokens, forms.without_source, forms.rows_alone
    gradient, swiglu_backward = forms.gradient_unfused, forms.swiglu_unfused


FORM: FormatType = BF16Form
