"""The form "fold": E4M3 with one scale per row and, with `wgrad_mx`, along the tokens per feature and 256 tokens.

One read of an activation makes both of its operands, and the backward keeps its tokens in place of it: half of the
memory of bf16. MX rows become tokens in one pass, and rows that a map gathers from packed ones either operand without
being stored.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.export import register_namedtuple_serialization

from ....core_kernels.formats import WEIGHT_HEADROOM, Rounding
from ....core_kernels.policy.recipe import Form
from ....core_kernels.policy.swiglu_gradient import Needs, gradient_op
from ... import ops
from ...ops.mx_array import MXArray
from . import form as forms
from .form import Added, Format, FormatType, Glu, Maybe, Operands, SwiGLUGradient, WeightOperands
from .mx import mx_tokens


class Folded(NamedTuple):
    """E4M3 bytes with one scale per row: q (M, K), sf (M,), of weights q (G, N, K), sf (G, N). Along the tokens with
    one scale per feature and chunk of 256 tokens: q (K, M), sf (`spans(M, G)`, K)."""

    q: jax.Array
    sf: jax.Array


register_namedtuple_serialization(Folded, serialized_name="mxep.Folded")


def folded_mm(
    form: Format, rows: Folded, w: Folded, ends: jax.Array, dtype: Any, bias: Added = None, clear_rest: bool = False
) -> jax.Array:
    if bias is None:
        return ops.grouped_mm_fold(*rows, *w, ends, dtype, clear_rest)
    if bias.row_weights is not None:
        return forms.bias_unfused(form, rows, w, ends, dtype, bias, clear_rest)
    return ops.grouped_mm_fold_bias(*rows, *w, bias.values, ends, dtype, clear_rest)


def folded_pair(
    form: Format, rows: Folded, w: Folded, w2: Folded, ends: jax.Array, bias: Maybe, bias2: Maybe, clear_rest: bool
) -> tuple[jax.Array, jax.Array]:
    if bias is not None or bias2 is not None:
        return forms.pair_unfused(form, rows, w, w2, ends, bias, bias2, clear_rest)
    return ops.grouped_mm_fold_pair(*rows, *w, *w2, ends, "bfloat16", clear_rest)


def folded_sum(
    form: Format, rows: Folded, w: Folded, rows2: Folded, w2: Folded, ends: jax.Array, dtype: Any,
    clear_rest: bool = False,
) -> jax.Array:  # fmt: skip
    return ops.grouped_mm_fold_sum(*rows, *w, *rows2, *w2, ends, dtype, clear_rest)


def folded_wgrad(form: Format, dout: Any, x: Any, ends: jax.Array, dtype: Any) -> jax.Array:
    if not form.wgrad_mx:
        return forms.wgrad_bf16(form, dout, x, ends, dtype)
    return ops.grouped_wgrad_fold(*dout, *x, ends, out_dtype=dtype)


def folded_wgrad_pair(
    form: Format, dout: Any, dout2: Any, x: Any, ends: jax.Array, dtypes: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    if not form.wgrad_mx or dtypes[0] != dtypes[1]:
        return forms.wgrads_unfused(form, dout, dout2, x, ends, dtypes)
    return ops.grouped_wgrad_fold_pair(*dout, *x, *dout2, ends, out_dtype=dtypes[0])


class FoldForm(NamedTuple):
    name: Form
    rounding: Rounding
    wgrad_mx: bool
    upcasts: bool

    quantizes = True

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Folded:
        if isinstance(x, Folded):
            return x
        if isinstance(x, MXArray):
            if (source := self._packed(x)) is not None:
                return Folded(*ops.permute_mx_fold(source[0], source[1], ends))
            x = (x.q, x.sf)
        if isinstance(x, tuple):
            return Folded(*ops.fold_rows(x[0], x[1], ends, headroom=headroom))
        return Folded(*ops.quantize_row_fold(x, ends, rounding=self.rounding, headroom=headroom))

    def _packed(self, x: MXArray) -> tuple[jax.Array, jax.Array] | None:
        """The packed rows and the row map of which both operands of x are made; None: they are made of q and sf."""
        return x.source if self.wgrad_mx else None

    def saved(self, x: Any) -> Any:
        if not isinstance(x, MXArray) or self._packed(x) is None:
            return forms.without_source(self, x)
        return dataclasses.replace(x, q=None, sf=None)

    def tokens(self, x: Any, ends: jax.Array) -> Any:
        if not self.wgrad_mx:
            return forms.as_bf16(x)
        if isinstance(x, MXArray) and x.source is not None:
            packed, row_map = x.source
            return Folded(*ops.permute_mx_col_fold(packed, row_map, ends, rounding=self.rounding))
        if isinstance(x, MXArray | tuple):
            q, sf = (x.q, x.sf) if isinstance(x, MXArray) else x
            return Folded(*ops.requantize_col_fold(q, sf, ends, rounding=self.rounding))
        q, sf = mx_tokens(x, self.rounding)
        return Folded(*ops.fold_groups(q, sf, ends))

    def activation(self, x: Any, ends: jax.Array) -> Operands:
        if not self.wgrad_mx or not isinstance(x, jax.Array):
            return Operands(self.rows(x, ends))
        q, sf, q_t, sf_t = ops.quantize_both_fold(x, ends, rounding=self.rounding)
        return Operands(Folded(q, sf), Folded(q_t, sf_t))

    def gradient(self, dout: Any, ends: jax.Array) -> Operands:
        rows, tokens = self.activation(dout, ends)
        return Operands(rows, tokens or self.tokens(dout, ends))

    def along_rows(self, w: jax.Array) -> Folded:
        return self.rows(w, headroom=WEIGHT_HEADROOM)

    def along_columns(self, w: jax.Array) -> Folded:
        return Folded(*ops.quantize_matrix_fold_t(w, rounding=self.rounding))

    def weights(self, w: jax.Array) -> WeightOperands:
        q, sf, q_t, sf_t = ops.quantize_matrix_fold(w, rounding=self.rounding)
        return WeightOperands(Folded(q, sf), Folded(q_t, sf_t))

    def hidden(self, glu: Glu) -> Folded:
        gate, up, prob, numbers, ends = glu
        return Folded(*ops.swiglu_row_fold(gate, up, prob, ends, self.rounding, False, *numbers))

    def swiglu_backward(self, dh: jax.Array, glu: Glu, need_values: bool) -> SwiGLUGradient:
        if gradient_op(self.name, self.wgrad_mx, Needs(True, True, need_values, True)) == "swiglu_bwd":
            return forms.swiglu_unfused(self, dh, glu, need_values)
        values = glu.gradient(dh)[:2] if need_values else (None, None)
        gate, up, prob, numbers, ends = glu
        *found, dprob = ops.swiglu_bwd_fold(dh, gate, up, prob, ends, self.rounding, False, *numbers)
        gate, gate_t, up, up_t, hidden = map(Folded, found[::2], found[1::2])
        return SwiGLUGradient(Operands(gate, gate_t), Operands(up, up_t), hidden, dprob, values)

    mm, mm_pair, mm_sum = folded_mm, folded_pair, folded_sum
    wgrad, wgrad_pair = folded_wgrad, folded_wgrad_pair


FORM: FormatType = FoldForm
