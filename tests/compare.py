"""The comparisons of the tests: bytes, the error bound of a matrix product, and SQNR in dB.

numpy, torch and JAX arrays are compared alike. A dB limit is a measured value less a stated margin.
"""

import sys
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
EPS = 2.0**-23  # fp32
BF16 = np.dtype(ml_dtypes.bfloat16)
HALF_ULP = 2.0**-8  # of bf16, relative to the power of two at or below a value
SMALLEST = {"bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 0.0}  # half of the smallest subnormal


def to_numpy(x: Any) -> Array:
    """The bits of a numpy, torch or JAX array as numpy; a torch FP8 or E8M0 tensor as uint8."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return np.asarray(x)
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(BF16)
    return (x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else x).numpy()


def same_bytes(got: Any, want: Any) -> None:
    """Raise AssertionError unless all arrays agree in shape, dtype and bits. A NaN equals any NaN of its dtype."""
    got, want = (x if isinstance(x, tuple | list) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(map(to_numpy, got), map(to_numpy, want), strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), f"output {i}"
        if g.dtype.kind not in "iu":
            nan = np.isnan(w.astype(np.float32))
            np.testing.assert_array_equal(np.isnan(g.astype(np.float32)), nan, err_msg=f"NaN of output {i}")
            g, w = (np.where(nan, np.zeros((), x.dtype), x).view(f"u{x.itemsize}") for x in (g, w))
        np.testing.assert_array_equal(g, w, err_msg=f"output {i}")


def gemm_bound(got: Any, exact: Any, magnitude: Any, k: Any, chain: float = 0, operands: Any = 0) -> None:
    """Raise AssertionError unless |got - exact| <= (2^-23 k + chain) sum|a||b| + rounding + operands.

    exact: the fp64 sum. magnitude: sum|a||b|. k: terms of the sum, or of each sum. rounding: for bf16 half an ulp of
    `exact`; none for fp32, whose last rounding is one of the sum's. chain: the loss of FP8 tensor cores, relative to
    sum|a||b|. operands: the error of the sum that is allowed because the factors differ from the factors of `exact`.
    NaN and infinity must be where `exact` has them.

    An fp32 sum s in any order has |s - exact| <= 2^-24 k sum|a||b|, half of the first term. The other half covers
    exact products that fp32 rounds, and a bf16 rounding of s above a power of two with `exact` below it: then either
    got is that power of two and no further from exact than s, or half an ulp is less than s - exact.
    """
    got, exact, magnitude = map(to_numpy, (got, exact, magnitude))
    dtype = got.dtype.name
    assert got.shape == exact.shape
    got = got.astype(np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    k, operands = (np.broadcast_to(x, exact.shape)[finite] for x in (k, operands))
    got, exact, magnitude = got[finite], exact[finite].astype(np.float64), magnitude[finite]
    rounding = SMALLEST[dtype]
    if dtype == "bfloat16":
        power = np.frexp(exact)[1] - 1  # of zero: -1, which bounds nothing
        rounding = np.maximum(np.where(exact == 0, 0, np.ldexp(HALF_ULP, power)), rounding)
    bound = (EPS * k + chain) * magnitude + rounding + operands
    error = np.abs(got - exact)
    worst = np.argmax(error - bound) if error.size else 0
    assert (error <= bound).all(), (
        f"error {error.flat[worst]:.3e} over the bound {bound.flat[worst]:.3e} at exact value {exact.flat[worst]:.6e}"
    )


def product_bound(got: Any, a: Any, b: Any) -> None:
    """`gemm_bound` of got = a (M, K) b (K, N), where a and b hold the values that are multiplied."""
    a, b = (to_numpy(x).astype(np.float64) for x in (a, b))
    gemm_bound(got, a @ b, np.abs(a) @ np.abs(b), a.shape[1])


def sqnr_db(got: Any, want: Any) -> float:
    """10 log10 of sum(want^2) / sum((got - want)^2), in fp64; infinite for equal arrays."""
    got, want = (to_numpy(x).astype(np.float64) for x in (got, want))
    error = np.sum((got - want) ** 2)
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(np.sum(want**2) / error)) if error else np.inf
