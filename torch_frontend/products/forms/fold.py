"""The form "fold": E4M3 with one scale per row and, with `wgrad_mx`, along the tokens per feature and 256 tokens.

One read of an activation makes both of its operands, and the backward saves its tokens in place of it: half of the
memory of bf16. MX rows become tokens in one pass, and `GatheredRows` either operand without being stored.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ....core_kernels.formats import WEIGHT_HEADROOM
from ....core_kernels.policy.recipe import Form
from ....core_kernels.policy.swiglu_gradient import Needs, gradient_op
from ...ops import direct as ops
from ...ops.launch import dtype_name
from ...ops.mx_tensor import MXTensor
from ..gathered_rows import GatheredRows
from . import form as forms
from .form import Added, DType, Format, FormatType, Glu, Maybe, Operands, SwiGLUGradient, TokenGroups, WeightOperands
from .mx import MX, mx_tokens

if TYPE_CHECKING:
    from ..backward_operands import BackwardOperands


class Folded(NamedTuple):
    """E4M3 bytes q (..., K) with one E8M0 byte per row, sf (...). Along M tokens in G groups: q (K, M) with one E8M0
    byte per feature and chunk of 256 tokens, sf (`spans(M, G)`, K)."""

    q: Tensor
    sf: Tensor


def folded_mm(
    form: Format, rows: Folded, w: Folded, ends: Tensor, dtype: DType, bias: Added = None, out: Maybe = None,
    clear_rest: bool = False,
) -> Tensor:  # fmt: skip
    if bias is None:
        return forms.written("grouped_mm_fold", (rows.q, rows.sf, w.q, w.sf, ends), dtype, out, clear_rest)
    if bias.row_weights is not None:
        return forms.bias_unfused(form, rows, w, ends, dtype, bias, out, clear_rest)
    operands = rows.q, rows.sf, w.q, w.sf, bias.values.contiguous(), ends
    return forms.written("grouped_mm_fold_bias", operands, dtype, out, clear_rest)


def folded_pair(
    form: Format, rows: Folded, w: Folded, w2: Folded, ends: Tensor, dtype: DType, bias: Maybe = None,
    bias2: Maybe = None, clear_rest: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if bias is not None or bias2 is not None:
        return forms.pair_unfused(form, rows, w, w2, ends, dtype, bias, bias2, clear_rest)
    return ops.grouped_mm_fold_pair(rows.q, rows.sf, w.q, w.sf, w2.q, w2.sf, ends, dtype_name(dtype), clear_rest)


def folded_sum(
    form: Format, rows: Folded, w: Folded, rows2: Folded, w2: Folded, ends: Tensor, dtype: DType, out: Maybe = None,
    clear_rest: bool = False,
) -> Tensor:  # fmt: skip
    operands = rows.q, rows.sf, w.q, w.sf, rows2.q, rows2.sf, w2.q, w2.sf, ends
    return forms.written("grouped_mm_fold_sum", operands, dtype, out, clear_rest)


def folded_wgrad(form: Format, dout: Any, x: Any, ends: Tensor, dtype: DType) -> Tensor:
    if not form.wgrad_mx:
        return forms.wgrad_bf16(form, dout, x, ends, dtype)
    return ops.grouped_wgrad_fold(dout.q, dout.sf, x.q, x.sf, ends, dtype_name(dtype))


def folded_wgrad_pair(
    form: Format, douts: Sequence[Any], x: Any, ends: Tensor, dtypes: Sequence[DType]
) -> tuple[Maybe, Maybe]:
    """In one launch where both are needed, in one dtype."""
    first, second = douts
    if first is None or second is None or not form.wgrad_mx or dtypes[0] != dtypes[1]:
        return forms.wgrads_unfused(form, douts, x, ends, dtypes)
    dtype = dtype_name(dtypes[0])
    return ops.grouped_wgrad_fold_pair(first.q, first.sf, x.q, x.sf, second.q, second.sf, ends, dtype)


class FoldForm(NamedTuple):
    name: Form
    rounding: int
    wgrad_mx: bool
    upcasts: bool

    quantizes = True

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Folded:
        if isinstance(x, Folded):
            return x
        if isinstance(x, GatheredRows):
            return Folded(*ops.permute_mx_fold(x.packed, x.row_map, ends))
        if isinstance(x, MXTensor):
            x = MX(*x.contiguous_parts())
        if isinstance(x, MX):
            return Folded(*ops.fold_rows(x.q, x.sf, ends, headroom))
        return Folded(*ops.quantize_row_fold(x.contiguous(), ends, self.rounding, False, headroom))

    def tokens(self, x: Any, groups: TokenGroups) -> Any:
        if not self.wgrad_mx or isinstance(x, Folded):
            return x
        ends, row_map = groups
        if isinstance(x, GatheredRows) and row_map is None:
            return Folded(*ops.permute_mx_col_fold(x.packed, x.row_map, ends, self.rounding))
        if isinstance(x, MXTensor):
            q, sf = x.contiguous_parts()
            q, sf = (q, sf) if row_map is None else ops.permute_q_sf(q, sf, row_map)
            return Folded(*ops.requantize_col_fold(q, sf, ends, self.rounding))
        q, sf = x if isinstance(x, MX) else mx_tokens(x, groups, self.rounding)
        return Folded(*ops.fold_groups(q, sf, ends))

    def activation(self, x: Tensor, ends: Tensor, whole: bool) -> Operands:
        if not whole or isinstance(x, MXTensor):
            return Operands(self.rows(x, ends))
        q, sf, q_t, sf_t = ops.quantize_both_fold(x.contiguous(), ends, self.rounding)
        return Operands(Folded(q, sf), Folded(q_t, sf_t))

    def gradient(self, dout: Tensor, ends: Tensor) -> Operands:
        if not self.wgrad_mx:
            return forms.share_gradient(self, dout, ends)
        rows, tokens = self.activation(dout, ends, True)
        return Operands(rows, tokens or self.tokens(dout, TokenGroups(ends)))

    def along_k(self, w: Tensor) -> Folded:
        return self.rows(w, headroom=WEIGHT_HEADROOM)

    def along_n(self, w: Tensor) -> Folded:
        return Folded(*ops.quantize_matrix_fold_t(w.contiguous(), self.rounding))

    def weights(self, w: Tensor) -> WeightOperands:
        q, sf, q_t, sf_t = ops.quantize_matrix_fold(w.contiguous(), self.rounding)
        return WeightOperands(Folded(q, sf), Folded(q_t, sf_t))

    def hidden(self, glu: Glu) -> Folded:
        gate, up, prob, numbers, ends = glu
        return Folded(*ops.swiglu_row_fold(gate, up, prob, ends, self.rounding, False, *numbers))

    def swiglu_backward(self, steps: "BackwardOperands", needs: Needs) -> SwiGLUGradient:
        op = gradient_op(self.name, steps.quantized_tokens, needs)
        if op == "swiglu_bwd":
            return steps.in_bf16(needs)
        values = steps.values()[:2] if needs.values else (None, None)
        return steps.in_form(steps.quantized(op), values)

    mm, mm_pair, mm_sum = folded_mm, folded_pair, folded_sum
    wgrad, wgrad_pair = folded_wgrad, folded_wgrad_pair


FORM: FormatType = FoldForm
