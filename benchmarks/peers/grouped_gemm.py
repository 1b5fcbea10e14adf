"""The grouped products of torch and XLA, and the dense products of cuBLAS that are their roof.

Every call has its own function. `torch._grouped_mm` and `torch._scaled_grouped_mm` are documented in torch's
sources only: they take a row-major (M, K), a column-major (G, K, N) and int32 group ends; scales are fp32, (M,) and
(G, N).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from .formulas_torch import scale

BF16, ROW_SCALED, RAGGED_DOT = "torch_grouped_mm_bf16", "torch_scaled_grouped_mm", "jax_ragged_dot_bf16"
DENSE_FP8, DENSE_FP8_FP32, DENSE_BF16 = "cublas_fp8", "cublas_fp8_fp32_sums", "cublas_bf16"
E4M3 = torch.float8_e4m3fn


def grouped_bf16(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x (M, K), w (G, N, K) -> (M, N)."""
    return torch._grouped_mm(x, w.mT, offs=ends)  # pyright: ignore[reportPrivateImportUsage]


def grouped_bf16_dgrad(dout: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """dout (M, N), w (G, N, K) -> (M, K)."""
    return torch._grouped_mm(dout, w, offs=ends)  # pyright: ignore[reportPrivateImportUsage]


def grouped_bf16_wgrad(dout: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """dout (M, N), x (M, K) -> (G, N, K)."""
    return torch._grouped_mm(dout.T, x, offs=ends)  # pyright: ignore[reportPrivateImportUsage]


def row_scaled(qf: Tensor, row_sf: Tensor) -> tuple[Tensor, Tensor]:
    """Folded bytes -> operands of `grouped_fp8`: E4M3 values and one fp32 scale per row."""
    return qf.view(E4M3), scale(row_sf)


def grouped_fp8(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, ends: Tensor) -> Tensor:
    """a (M, K), b (G, N, K) E4M3 -> (M, N) bf16. Accumulates in fp32, as ours does."""
    return torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b.mT, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=False
    )


def dense_fp8(a: Tensor, b: Tensor, fast: bool) -> Callable[[], Tensor]:
    """cuBLAS: bytes a (M, K) x b (N, K) -> (M, N) bf16, one scale per operand. fast: no promotion to fp32 sums."""
    one = torch.ones((), device=a.device)
    a, b_t = a.view(E4M3), b.view(E4M3).T
    multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return lambda: multiply(a, b_t, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)


def ragged_dot(
    x: Tensor, w: Tensor, ends: Tensor
) -> tuple[Callable[..., tuple[jax.Array, ...]], tuple[jax.Array, ...]]:
    """jax.lax.ragged_dot, compiled, and its arguments. The weights are (G, K, N), the documented layout."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    weights = jnp.swapaxes(jax.dlpack.from_dlpack(w), 1, 2)
    arrays = (jax.dlpack.from_dlpack(x), weights, jax.dlpack.from_dlpack(sizes))
    product = jax.jit(lambda *args: (jax.lax.ragged_dot(*args, preferred_element_type=jnp.bfloat16),))
    return product.lower(*arrays).compile(), arrays


def autograd(
    product: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, w: Tensor, ends: Tensor, dout: Tensor
) -> tuple[Tensor, ...]:
    """Forward, input gradient and weight gradient of `product(x, w, ends)`; x and w are leaves."""
    out = product(x, w, ends)
    return out.detach(), *torch.autograd.grad(out, (x, w), dout)
