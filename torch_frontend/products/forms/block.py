"""The forms "block" and "block_power_of_two": E4M3 with one fp32 scale per 128 values of a row, and per 128 x 128 of a
weight, whose bytes serve both products. With `wgrad_mx` tokens are folded as in form "fold", and made in the same read
as rows."""

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ....core_kernels.policy.recipe import Form
from ....core_kernels.policy.swiglu_gradient import Needs
from ...ops import direct as ops
from ...ops.mx_tensor import dequantized
from . import form as forms
from .fold import Folded, folded_wgrad, folded_wgrad_pair
from .form import (
    Added,
    DType,
    FormatType,
    Glu,
    Maybe,
    Operands,
    SwiGLUGradient,
    TokenGroups,
    WeightOperands,
)
from .mx import MX, mx_tokens

if TYPE_CHECKING:
    from ..backward_operands import BackwardOperands


class Blockwise(NamedTuple):
    """E4M3 bytes q (..., K) with one fp32 scale per 128 values, sf (..., K/128); of weights q (G, N, K) with one per
    128 x 128 values, sf (G, N/128, K/128)."""

    q: Tensor
    sf: Tensor


class BlockForm(NamedTuple):
    name: Form
    rounding: int
    wgrad_mx: bool
    upcasts: bool

    quantizes = True

    def rows(self, x: Any, ends: Maybe = None, headroom: int = 0) -> Blockwise:
        if isinstance(x, Blockwise):
            return x
        return Blockwise(*ops.quantize_blockwise(dequantized(x).contiguous(), ends, self._power_of_two))

    def tokens(self, x: Any, groups: TokenGroups) -> Any:
        if not self.wgrad_mx or isinstance(x, Folded):
            return x
        q, sf = x if isinstance(x, MX) else mx_tokens(x, groups, self.rounding)
        return Folded(*ops.fold_groups(q, sf, groups.ends))

    def activation(self, x: Tensor, ends: Tensor, whole: bool) -> Operands:
        if not whole:
            return Operands(self.rows(x, ends))
        q, sf, q_t, sf_t = ops.quantize_blockwise_fold(dequantized(x).contiguous(), ends, self._power_of_two)
        return Operands(Blockwise(q, sf), Folded(q_t, sf_t))

    def gradient(self, dout: Tensor, ends: Tensor) -> Operands:
        return self.activation(dout, ends, True) if self.wgrad_mx else forms.share_gradient(self, dout, ends)

    def along_k(self, w: Tensor) -> Blockwise:
        return Blockwise(*ops.quantize_squares(w.contiguous(), self._power_of_two))

    def along_n(self, w: Tensor) -> Blockwise:
        return self.weights(w).along_n

    def weights(self, w: Tensor) -> WeightOperands:
        q, sf, q_t, sf_t = ops.quantize_squares_both(w.contiguous(), self._power_of_two)
        return WeightOperands(Blockwise(q, sf), Blockwise(q_t, sf_t))

    def hidden(self, glu: Glu) -> Blockwise:
        gate, up, prob, numbers, ends = glu
        return Blockwise(*ops.swiglu_blockwise(gate, up, prob, ends, self._power_of_two, *numbers))

    def swiglu_backward(self, steps: "BackwardOperands", needs: Needs) -> SwiGLUGradient:
        rows, tokens, values, hidden = needs
        if not steps.quantized_tokens or values or not (rows and tokens and hidden):
            return steps.in_bf16(needs, self.gradient if self.wgrad_mx else None)
        dh, (gate, up, prob, numbers, ends) = steps.dh, steps.glu
        # Its folded rows are not read, and are freed before the rows are made: 2 bytes per value. From dgate and dup in
        # bf16 it would be 8 more.
        found = steps.quantized("swiglu_bwd_fold")._replace(gate_rows=None, up_rows=None)
        q, sf, q2, sf2 = ops.swiglu_blockwise_bwd(dh, gate, up, prob, ends, self._power_of_two, *numbers)
        return found._replace(gate_rows=Blockwise(q, sf), up_rows=Blockwise(q2, sf2))

    def mm(
        self, rows: Any, w: Any, ends: Tensor, dtype: DType, bias: Added = None, out: Maybe = None,
        clear_rest: bool = False,
    ) -> Tensor:  # fmt: skip
        if bias is not None:
            return forms.bias_unfused(self, rows, w, ends, dtype, bias, out, clear_rest)
        return forms.written("grouped_mm_blockwise", (rows.q, rows.sf, w.q, w.sf, ends), dtype, out, clear_rest)

    def mm_sum(
        self, rows: Blockwise, w: Blockwise, rows2: Blockwise, w2: Blockwise, ends: Tensor, dtype: DType,
        out: Maybe = None, clear_rest: bool = False,
    ) -> Tensor:  # fmt: skip
        return forms.written("grouped_mm_blockwise_sum", (*rows, *w, *rows2, *w2, ends), dtype, out, clear_rest)

    @property
    def _power_of_two(self) -> bool:
        return self.name == "block_power_of_two"

    mm_pair, wgrad, wgrad_pair = forms.pair_unfused, folded_wgrad, folded_wgrad_pair


FORM: FormatType = BlockForm
