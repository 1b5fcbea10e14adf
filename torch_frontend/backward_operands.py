"""The operands of the products in the backward of ffn.py, in the recipe's form.

    dout --.--rows-----> dh = dout w2
           '--tokens---> dw2 = dout^T h

    dh, gate, up, prob --swiglu--> dgate, dup --.--rows----> dx = dgate w1 + dup w3
                            |                   '--tokens--> dw1, dw3 = dgate^T x, dup^T x
                            '----> h, again --tokens--> dw2

`swiglu` chooses the kernel by the operands that are needed. With b1 or b3 another kernel computes dgate and dup in
bf16.
"""

from typing import Any

from torch import Tensor

from ..core_kernels.recipe import Form
from . import _direct as ops
from .products import (
    Operand,
    ProductOptions,
    gradient_rows,
    is_mx,
    output_gradient_operands,
    pad_to_blocks,
    row_operand,
    token_operand,
)
from .weights import MX, Folded, WeightOperand, along_n

Unused = Any
"""An operand, or None if no gradient needs it."""


class BackwardOperands:
    """Of one backward. It holds gate, up and prob until a kernel has computed all that needs them."""

    def __init__(
        self, group_ends: Tensor, gate: Tensor, up: Tensor, prob: Tensor, options: ProductOptions,
        numbers: tuple[float, float, float],
    ) -> None:  # fmt: skip
        self.glu: Any = gate, up, prob
        self.hidden: MX | Folded | None = None  # along the tokens, from `swiglu` to `hidden_tokens`
        self.group_ends, self.numbers = group_ends, numbers
        self.form: Form = options.form
        self.rounding, self.wgrad_mx = options.rounding, options.wgrad_mx
        self.fused = options.wgrad_mx and not options.pad
        pad = options.wgrad_mx and options.pad
        self.row_map, self.token_ends = pad_to_blocks(group_ends, gate.shape[0]) if pad else (None, group_ends)

    def rows(self, x: Unused) -> Operand:
        return row_operand(x, self.form, self.rounding)

    def gradient_rows(self, x: Unused) -> Operand:
        """x: dgate or dup."""
        return gradient_rows(x, self.form, self.rounding)

    def along_n(self, w: Operand) -> WeightOperand:
        """w: (G, N, K), or its operand along N."""
        return along_n(w, self.form, self.rounding) if isinstance(w, Tensor) else w

    def tokens(self, x: Tensor | MX | Folded) -> Operand:
        if not self.wgrad_mx:
            return x
        return token_operand(x, self.form, self.rounding, self.token_ends, self.row_map)

    def output_gradient(self, dout: Tensor, need_tokens: bool) -> tuple[Unused, Unused]:
        """Return (row operand, token operand) of dout."""
        if not need_tokens:
            return dout, None
        if self.fused:
            return output_gradient_operands(dout, self.form, self.rounding, self.token_ends)
        return dout, self.tokens(dout)

    def hidden_tokens(self) -> Operand:
        if self.hidden is not None:
            hidden, self.hidden = self.hidden, None
            return self.tokens(hidden)
        if self.fused:
            return self.tokens(MX(*ops.swiglu_col(*self.glu, self.rounding, False, *self.numbers)))
        return self.tokens(ops.swiglu(*self.glu, *self.numbers))

    def swiglu(
        self, dh: Tensor, need_rows: bool, need_tokens: bool, need_values: bool, need_hidden: bool
    ) -> tuple[tuple[Unused, Unused], tuple[Unused, Unused], Tensor, tuple[Tensor, ...]]:
        """Return dgate and dup, each as (row operand, token operand); dprob; and both in bf16 if `need_values`.

        need_hidden: `hidden_tokens` follows. Where one kernel computes all of it, it lets go of gate and up.
        """
        arguments = dh, *self.glu, self.rounding, False, *self.numbers
        if self.form == "fold" and self.fused and need_rows and need_tokens and need_hidden:
            values = ops.swiglu_bwd(dh, *self.glu, *self.numbers)[:2] if need_values else ()
            *parts, dprob = ops.swiglu_bwd_fold(*arguments[:4], self.token_ends, *arguments[4:])
            gate, gate_t, up, up_t, hidden = (Folded(*parts[i : i + 2]) for i in range(0, 10, 2))
            self.glu, self.hidden = None, hidden
            return (gate, gate_t), (up, up_t), dprob, values
        if need_values or not is_mx(self.form) or (need_tokens and not self.fused):
            dgate, dup, dprob = ops.swiglu_bwd(dh, *self.glu, *self.numbers)
            of_gate, of_up = (self._operands(x, need_rows, need_tokens) for x in (dgate, dup))
            return of_gate, of_up, dprob, (dgate, dup)
        if need_rows and need_tokens:
            if need_hidden:
                q, sf, q_t, sf_t, *up, h_q_t, h_sf_t, dprob = ops.swiglu_bwd_all(*arguments)
                self.glu, self.hidden = None, MX(h_q_t, h_sf_t)
            else:
                q, sf, q_t, sf_t, *up, dprob = ops.swiglu_bwd_both(*arguments)
            del dh, arguments
            of_gate = MX(q, sf), self.tokens(MX(q_t, sf_t))
            del q_t, sf_t
            return of_gate, (MX(*up[:2]), self.tokens(MX(*up[2:]))), dprob, ()
        if need_tokens:
            q_t, sf_t, *up, dprob = ops.swiglu_bwd_col(*arguments)
            return (None, self.tokens(MX(q_t, sf_t))), (None, self.tokens(MX(*up))), dprob, ()
        if need_rows:
            q, sf, *up, dprob = ops.swiglu_bwd_row(*arguments)
            return (MX(q, sf), None), (MX(*up), None), dprob, ()
        return (None, None), (None, None), ops.swiglu_bwd(dh, *self.glu, *self.numbers)[2], ()

    def _operands(self, x: Tensor, need_rows: bool, need_tokens: bool) -> tuple[Unused, Unused]:
        """(row operand, token operand) of dgate or dup in bf16. `gradient_rows` folds the rows, with a headroom."""
        if need_rows and need_tokens and self.fused and self.form != "fold":
            return output_gradient_operands(x, self.form, self.rounding, self.token_ends)
        return x, self.tokens(x) if need_tokens else None
