"""Dense layers of others, forward and both gradients of one weight (N, K).

F.linear              bf16, cuBLAS
torch._scaled_mm      E4M3 with one fp32 scale per row of each operand; amax, scales and transposes compiled by Inductor
torchao               float8 training, recipe "rowwise", compiled; where torchao is installed
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BF16, BF16_COMPILED = "torch_linear_bf16", "torch_linear_bf16_compiled"
SCALED_MM, TORCHAO = "torch_scaled_mm_rowwise", "torchao_float8_rowwise"
JAX_BF16 = "jax_dot_bf16"
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
Product = Callable[[Tensor, Tensor], Tensor]
"""x (M, K), w (N, K) -> (M, N), differentiable."""


def steps_of(product: Product, x: Tensor, w: Tensor, dout: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A step: the product and its gradients of x and w, which are leaves."""

    def step() -> tuple[Tensor, ...]:
        out = product(x, w)
        return out.detach(), *torch.autograd.grad(out, (x, w), dout)

    return step


def linear_bf16(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (R, C) -> E4M3 and fp32 scales (R, 1)."""
    values = x.float()
    scale = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (values / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def _quantized_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of x and of its transpose, row-major both."""
    q_t, scale_t = _quantized(x.T)
    return *_quantized(x), q_t.contiguous(), scale_t


def _multiply(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """a (M, K), b (N, K) -> (M, N)."""
    multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return multiply(a, b.T, scale_a, scale_b.T, out_dtype=torch.bfloat16, use_fast_accum=True)


@cache
def scaled_mm(compiled: bool) -> Product:
    """The product on `torch._scaled_mm`: each operand of the three products has one scale per row along the sum."""
    quantize: Callable[..., Any] = torch.compile(_quantized_both, dynamic=False) if compiled else _quantized_both

    class ScaledMM(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            x_q, x_scale, x_t, x_t_scale = quantize(x.detach())
            w_q, w_scale, w_t, w_t_scale = quantize(w.detach())
            ctx.save_for_backward(x_t, x_t_scale, w_t, w_t_scale)
            return _multiply(x_q, x_scale, w_q, w_scale)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x_t, x_t_scale, w_t, w_t_scale = ctx.saved_tensors
            q, scale, q_t, scale_t = quantize(grads[0])
            return _multiply(q, scale, w_t, w_t_scale), _multiply(q_t, scale_t, x_t, x_t_scale)

    return ScaledMM.apply


def has_torchao() -> bool:
    return find_spec("torchao") is not None


def torchao_step(x: Tensor, w: Tensor, dout: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A step of torchao's layer, compiled."""
    float8: Any = import_module("torchao.float8")
    layer = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta"))
    layer[0].weight = nn.Parameter(w.detach())
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(layer, config=config)
    program, (weight,) = torch.compile(layer, dynamic=False), layer.parameters()

    def step() -> tuple[Tensor, ...]:
        out = program(x)
        return out.detach(), *torch.autograd.grad(out, (x, weight), dout)

    return step
