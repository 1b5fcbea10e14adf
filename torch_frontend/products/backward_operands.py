"""The operands of the products in a feed-forward's backward, in the recipe's form.

    dout --.--rows-----> dh = dout w2
           '--tokens---> dw2 = dout^T h

    dh, gate, up, prob --swiglu_backward--> dgate, dup --.--rows----> dx = dgate w1 + dup w3
                               |                         '--tokens--> dw1, dw3 = dgate^T x, dup^T x
                               '----> h, again --tokens--> dw2

core_kernels/policy/swiglu_gradient.py chooses the kernel by the operands that are needed.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...core_kernels.formats import GRADIENT_HEADROOM
from ...core_kernels.policy.swiglu_gradient import PARTS, Needs
from ..ops import direct as ops
from .forms.fold import Folded
from .forms.form import Glu, Maybe, Operands, SwiGLUGradient
from .forms.mx import MX
from .products import ProductOptions

Read = Callable[[Tensor, Tensor], Operands]


class BackwardOperands:
    """Of one backward. It holds dh, gate, up and prob until a kernel has computed all that needs them."""

    def __init__(self, options: ProductOptions, glu: Glu) -> None:
        self.form = options.form
        self.glu: Any = glu
        self.dh: Any = None
        self.hidden: Any = None  # h along the tokens, from `quantized` to `hidden_tokens`
        self.ends = glu.ends
        self.groups = options.token_groups(glu.ends, glu.gate.shape[0])
        self.quantized_tokens = options.form.wgrad_mx and not options.pad

    def tokens(self, x: Any) -> Any:
        return self.form.tokens(x, self.groups)

    def gradient_rows(self, x: Any) -> Any:
        """Rows of dgate or dup. Folded, they have the bytes of swiglu_bwd_fold, whichever op quantizes them."""
        return self.form.rows(x, self.ends, GRADIENT_HEADROOM)

    def both(self, x: Tensor, read: Read) -> Operands:
        """Rows and tokens. Rows are not quantized yet if padding makes tokens another read."""
        return read(x, self.groups.ends) if self.groups.row_map is None else Operands(x, self.tokens(x))

    def hidden_tokens(self) -> Any:
        if self.hidden is not None:
            hidden, self.hidden = self.hidden, None
            return self.tokens(hidden)
        if not self.quantized_tokens:
            return self.tokens(self.glu.hidden())
        gate, up, prob, numbers, _ = self.glu
        return self.tokens(MX(*ops.swiglu_col(gate, up, prob, self.form.rounding, False, *numbers)))

    def values(self) -> tuple[Tensor, Tensor, Tensor]:
        """dgate and dup in bf16, and dprob."""
        gate, up, prob, numbers, ends = self.glu
        return ops.swiglu_bwd(self.dh, gate, up, prob, ends, *numbers)

    def in_bf16(self, needs: Needs, read: Read | None = None) -> SwiGLUGradient:
        """What follows from dgate and dup in bf16. read: makes rows and tokens of one of them."""
        dgate, dup, dprob = self.values()
        self.dh = None
        values = (dgate, dup) if needs.values else (None, None)
        if read is not None and needs.rows and needs.tokens:
            gate = self.both(dgate, read)
            del dgate  # before the operands of dup are made
            up = self.both(dup, read)
        else:
            gate, up = (
                Operands(x if needs.rows else None, self.tokens(x) if needs.tokens else None) for x in (dgate, dup)
            )
        return SwiGLUGradient(dprob, gate.rows, up.rows, gate.tokens, up.tokens, values)

    def quantized(self, op: str) -> SwiGLUGradient:
        """What the op writes: Folded or MX. If that has h, nothing reads dh, gate and up any more."""
        gate, up, prob, numbers, ends = self.glu
        dh, rounding, kind = self.dh, self.form.rounding, MX
        if op == "swiglu_bwd_fold":
            kind = Folded
            *found, dprob = ops.swiglu_bwd_fold(dh, gate, up, prob, ends, rounding, False, *numbers)
        else:
            *found, dprob = getattr(ops, op)(dh, gate, up, prob, rounding, False, *numbers)
        parts = dict(zip(PARTS[op], map(kind, found[::2], found[1::2]), strict=True))
        self.dh, self.hidden = None, parts.pop("hidden", None)
        if self.hidden is not None:
            self.glu = None
        return SwiGLUGradient(dprob, **parts)

    def in_form(self, found: SwiGLUGradient, values: tuple[Maybe, Maybe] = (None, None)) -> SwiGLUGradient:
        """With tokens in the form, one after the other."""
        dprob, gate, up, gate_tokens, up_tokens, _ = found
        del found
        gate_tokens = None if gate_tokens is None else self.tokens(gate_tokens)
        up_tokens = None if up_tokens is None else self.tokens(up_tokens)
        return SwiGLUGradient(dprob, gate, up, gate_tokens, up_tokens, values)
