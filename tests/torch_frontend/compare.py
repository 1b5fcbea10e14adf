"""The bound of a product and SQNR, in torch; bytes are compared with torch.equal."""

import torch
from torch import Tensor

EPS = 2.0**-23
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def within_bound(got: Tensor, a: Tensor, b: Tensor) -> None:
    """`got` is a (M, K) @ b (K, N) up to fp32 accumulation and one rounding to got's dtype (numerics contract)."""
    a, b = a.double(), b.double()
    exact, magnitude = a @ b, a.abs() @ b.abs()
    bound = EPS * a.shape[1] * magnitude + HALF_ULP[got.dtype] * torch.maximum(exact.abs(), got.double().abs())
    error = (got.double() - exact).abs()
    assert (error <= bound).all(), f"error exceeds the bound by {(error - bound).max():.3e}"


def sqnr_db(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return (10 * torch.log10(want.square().sum() / (got - want).square().sum())).item()
