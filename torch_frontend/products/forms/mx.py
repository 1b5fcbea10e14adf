"""The form "mx": E4M3 with one scale per 32 values along the rows and, with `wgrad_mx`, along the tokens.

Hopper's tensor cores take no scales per 32: there an operand is dequantized once, and the products multiply bf16.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ....core_kernels.policy.recipe import Form
from ....core_kernels.policy.swiglu_gradient import Needs, gradient_op
from ...ops import direct as ops
from ...ops.launch import dtype_name
from ...ops.mx_tensor import MXTensor, dequantized
from . import form as forms
from .form import Added, DType, FormatType, Glu, Maybe, Operands, SwiGLUGradient, TokenGroups, WeightOperands

if TYPE_CHECKING:
    from ..backward_operands import BackwardOperands


class MX(NamedTuple):
    """E4M3 bytes q (..., K) with one E8M0 byte per 32 values, sf (..., K/32)."""

    q: Tensor
    sf: Tensor


class Upcast(NamedTuple):
    """MX dequantized to bf16, the operand on sm_90."""

    x: Tensor


def mx_tokens(x: Tensor, groups: TokenGroups, rounding: int) -> MX:
    """x (M, K) quantized along M, after padding."""
    x = dequantized(x).contiguous()
    return MX(*ops.quantize_col(x if groups.row_map is None else ops.permute_rows(x, groups.row_map), rounding))


class MXForm(NamedTuple):
    name: Form
    rounding: int
    wgrad_mx: bool
    upcasts: bool

    quantizes = True

    def _multiplied(self, x: MX) -> MX | Upcast:
        return Upcast(ops.dequantize(*x)) if self.upcasts else x

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> MX | Upcast:
        if isinstance(x, Upcast):
            return x
        if isinstance(x, MXTensor):
            x = MX(*x.contiguous_parts())
        elif not isinstance(x, MX):
            x = MX(*ops.quantize_row(x.contiguous(), self.rounding))
        return self._multiplied(x)

    def tokens(self, x: Any, groups: TokenGroups) -> Any:
        if not self.wgrad_mx or isinstance(x, Upcast):
            return x
        return self._multiplied(x if isinstance(x, MX) else mx_tokens(x, groups, self.rounding))

    def gradient(self, dout: Tensor, ends: Tensor) -> Operands:
        if not self.wgrad_mx:
            return forms.share_gradient(self, dout, ends)
        if isinstance(dout, MXTensor):
            return Operands(self.rows(dout), self.tokens(dout, TokenGroups(ends)))
        q, sf, q_t, sf_t = ops.quantize_both(dout.contiguous(), self.rounding)
        return Operands(MX(q, sf), self._multiplied(MX(q_t, sf_t)))

    def along_k(self, w: Tensor) -> MX | Upcast:
        return self.rows(w)

    def along_n(self, w: Tensor) -> MX | Upcast:
        return self._multiplied(MX(*ops.quantize_col(w.contiguous(), self.rounding)))

    def weights(self, w: Tensor) -> WeightOperands:
        q, sf, q_t, sf_t = ops.quantize_both(w.contiguous(), self.rounding)
        return WeightOperands(self._multiplied(MX(q, sf)), self._multiplied(MX(q_t, sf_t)))

    def hidden(self, glu: Glu) -> MX | Upcast:
        gate, up, prob, numbers, _ = glu
        return self._multiplied(MX(*ops.swiglu_row(gate, up, prob, self.rounding, False, *numbers)))

    def swiglu_backward(self, steps: "BackwardOperands", needs: Needs) -> SwiGLUGradient:
        op = gradient_op(self.name, steps.quantized_tokens, needs)
        if op == "swiglu_bwd":
            return steps.in_bf16(needs, self.gradient)
        return steps.in_form(steps.quantized(op))

    def mm(
        self, rows: Any, w: Any, ends: Tensor, dtype: DType, bias: Added = None, out: Maybe = None,
        clear_rest: bool = False,
    ) -> Tensor:  # fmt: skip
        if bias is not None:
            return forms.bias_unfused(self, rows, w, ends, dtype, bias, out, clear_rest)
        if self.upcasts:
            return forms.written("grouped_mm_bf16", (rows.x, w.x, ends), dtype, out, clear_rest)
        return forms.written("grouped_mm_mx", (rows.q, rows.sf, w.q, w.sf, ends), dtype, out, clear_rest)

    def wgrad(self, dout: Any, x: Any, ends: Tensor, dtype: DType) -> Tensor:
        if not self.wgrad_mx:
            return forms.wgrad_bf16(self, dout, x, ends, dtype)
        if self.upcasts:
            return ops.grouped_wgrad_bf16_t(dout.x, x.x, ends, dtype_name(dtype))
        return ops.grouped_wgrad_mx(dout.q, dout.sf, x.q, x.sf, ends, dtype_name(dtype))

    activation, mm_pair, mm_sum, wgrad_pair = (
        forms.rows_alone,
        forms.pair_unfused,
        forms.sum_unfused,
        forms.wgrads_unfused,
    )


FORM: FormatType = MXForm
