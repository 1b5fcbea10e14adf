"""SwiGLU and its gradient, which is computed from gate and up: nothing else is saved.

gate, up, prob --swiglu--> h          dgate, dup, dprob <--swiglu_bwd-- dh, gate, up, prob

A form quantizes h in the same pass: `Format.hidden`.
"""

from typing import Any

import torch
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.swiglu.activation import PLAIN, Numbers, SwiGLU
from ..ops import direct as ops
from ..ops.call import require_tensor
from ..ops.checks import check_plain, check_probs, check_shape
from ..ops.differentiable import differentiable
from ..ops.launch import check_devices
from ..ops.mx_tensor import dequantized


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, prob: Tensor, numbers: Numbers) -> Tensor:
        gate, up, prob = gate.contiguous(), up.contiguous(), prob.contiguous()
        ctx.save_for_backward(gate, up, prob)
        ctx.numbers = numbers
        return ops.swiglu(gate, up, prob, None, *numbers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (gate, up, prob), (alpha, limit, offset) = ctx.saved_tensors, ctx.numbers
        dh = dequantized(grads[0]).contiguous()
        dgate, dup, dprob = ops.swiglu_bwd(dh, gate, up, prob, None, alpha, limit, offset)
        return dgate, dup, dprob, None


_swiglu = differentiable("swiglu", _SwiGLU)


def row_probabilities(op: str, prob: Tensor | None, rows: Tensor) -> Tensor:
    """`prob` as the ops take it, shape (0,) for a weight of 1 on every row; raises unless it has one value per row."""
    if prob is None:
        return torch.empty(0, dtype=torch.float32, device=rows.device)
    check_probs(op, "prob", prob, rows.shape[:1], rows.device)
    return prob


def swiglu(gate: Tensor, up: Tensor, prob: Tensor | None = None, activation: SwiGLU = PLAIN) -> Tensor:
    """silu(gate) * up * prob, computed in fp32 and rounded once; differentiable in all three.

    Args:
        gate: (M, F) bfloat16.
        up: (M, F) bfloat16.
        prob: (M,) float32, a weight per row, or None.
        activation: a `SwiGLU`, which limits gate and up and changes the formula.

    Returns:
        (M, F) bfloat16. The result has the same bits on every device.

    Raises:
        ValueError: shapes.
        TypeError: dtypes.

    Example:
        >>> one = torch.ones(1, 1, dtype=torch.bfloat16)
        >>> swiglu(one, one, torch.tensor([2.0])).item()  # 2 sigmoid(1)
        1.4609375
        >>> swiglu(one, one, activation=SwiGLU(limit=0.5, offset=1.0)).item()  # 1.5 * 0.5 * sigmoid(0.5)
        0.466796875

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    op = "swiglu"
    for name, x in (("gate", gate), ("up", up)):
        check_plain(op, name, x)
        require_tensor(op, name, x)
        if x.dtype != torch.bfloat16:
            fail(TypeError, op, name, f"dtype {x.dtype}", "allowed: bfloat16")
    check_shape(op, "gate", gate, ("M", "F"))
    check_shape(op, "up", up, tuple(gate.shape))
    check_devices(op, "gate", gate.device, up=up)
    numbers = SwiGLU.check(op, activation).attributes
    return _swiglu(gate, up, row_probabilities(op, prob, gate), numbers)
