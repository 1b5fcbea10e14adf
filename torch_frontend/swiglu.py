"""SwiGLU with its gradient, computed from gate and up: nothing else is saved.

gate, up, prob --swiglu--> h          dgate, dup, dprob <--swiglu_bwd-- dh, gate, up, prob
"""

from typing import Any

import torch
from torch import Tensor

from . import ops
from ._call import require_tensor
from ._differentiable import differentiable
from .mx_tensor import plain


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, prob: Tensor) -> Tensor:
        gate, up, prob = gate.contiguous(), up.contiguous(), prob.contiguous()
        ctx.save_for_backward(gate, up, prob)
        return ops.swiglu(gate, up, prob)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ops.swiglu_bwd(plain(grads[0]).contiguous(), *ctx.saved_tensors)


_swiglu = differentiable("swiglu", _SwiGLU)


def weights(op: str, prob: Tensor | None, device: torch.device) -> Tensor:
    """`prob` as the ops take it: an empty tensor where every row weighs one."""
    if prob is None:
        return torch.empty(0, dtype=torch.float32, device=device)
    require_tensor(op, "prob", prob)
    return prob


def swiglu(gate: Tensor, up: Tensor, prob: Tensor | None = None) -> Tensor:
    """silu(gate) * up * prob, in fp32 and rounded once; differentiable in all three.

    gate, up: (M, F) bfloat16. prob: (M,) float32, a weight per row, or None. Returns (M, F) bfloat16. The bits are
    those of the ops `swiglu` and `swiglu_bwd` on every device. Raises ValueError (shapes) and TypeError (dtypes).

    >>> swiglu(torch.ones(1, 1).bfloat16(), torch.ones(1, 1).bfloat16(), torch.tensor([2.0])).item()  # 2 sigmoid(1)
    1.4609375

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    require_tensor("swiglu", "gate", gate)
    require_tensor("swiglu", "up", up)
    return _swiglu(gate, up, weights("swiglu", prob, gate.device))
