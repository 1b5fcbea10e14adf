"""The comparisons of the tests: bytes, the error bound of a matrix product, and SQNR in dB.

numpy, torch and JAX arrays are compared alike. A dB limit is a measured value less a stated margin.
"""

import sys
from typing import Any

import numpy as np
from mxep.core_kernels.conformance import compare

Array = np.ndarray
BF16, EPS = compare.BF16, compare.EPS


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
    got, want = (tuple(map(to_numpy, x if isinstance(x, tuple | list) else (x,))) for x in (got, want))
    compare.same_bytes(got, want)


def gemm_bound(got: Any, exact: Any, magnitude: Any, k: Any, chain: float = 0, operands: Any = 0) -> None:
    """`gemm_bound` of mxep.core_kernels.conformance.compare."""
    compare.gemm_bound(*map(to_numpy, (got, exact, magnitude)), k, chain, operands)


def product_bound(got: Any, a: Any, b: Any) -> None:
    """`gemm_bound` of got = a (M, K) b (K, N), where a and b hold the values that are multiplied."""
    a, b = (to_numpy(x).astype(np.float64) for x in (a, b))
    gemm_bound(got, a @ b, np.abs(a) @ np.abs(b), a.shape[1])


def sqnr_db(got: Any, want: Any) -> float:
    """`sqnr_db` of mxep.core_kernels.conformance.compare."""
    return compare.sqnr_db(to_numpy(got), to_numpy(want))
