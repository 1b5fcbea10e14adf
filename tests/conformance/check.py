"""The grades of comparison: exact bytes, the bound of a GEMM, and SQNR, which never stands alone."""

from importlib import import_module

import numpy as np
from mxep.core_kernels.grouped_gemm import oracle

Array = np.ndarray
EPS = 2.0**-23  # fp32
C = 1.0  # the bound's constant: an fp32 sum in any order stays below half of it
FP8_CHAIN = 2.0**-9
"""What an FP8 tensor core of sm_90 may lose of sum|a||b|: it aligns 32 products and the sum so far to the largest of
them and cuts each below 2^-13 of it. At worst that is 33 * 2^-13 for every 32 terms; measured 2^-11 where a group has
32 terms of widely spread magnitudes, 2^-14 at 7168. The distance in dB is the sharper test: see
test_grouped_gemm_folded.py."""
HALF_ULP = {"bfloat16": 2.0**-8, "float32": 2.0**-24}  # relative to the power of two at or below a value
SMALLEST = {"bfloat16": 2.0**-134, "float32": 2.0**-150}  # half of the smallest subnormal


def same_bytes(got: object, want: object) -> None:
    """Every array has the same shape, dtype and bits; a NaN is any NaN of the dtype (floats only)."""
    got, want = (x if isinstance(x, tuple | list) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), f"output {i}"
        if g.dtype.kind not in "iu":
            nan = np.isnan(w.astype(np.float32))
            np.testing.assert_array_equal(np.isnan(g.astype(np.float32)), nan, err_msg=f"NaN of output {i}")
            g, w = (np.where(nan, np.zeros((), x.dtype), x).view(f"u{x.itemsize}") for x in (g, w))
        np.testing.assert_array_equal(g, w, err_msg=f"output {i}")


def gemm_bound(
    got: Array, exact: Array, magnitude: Array, k: int, chain: float = 0, operands: Array | float = 0
) -> None:
    """|got - exact| <= (c * eps_fp32 * K + chain) * sum|a||b| + half an ulp of the output dtype + operands.

    exact: the fp64 sum. magnitude: sum|a||b|. k: terms of the sum. chain: `FP8_CHAIN` where FP8 tensor cores sum.
    operands: what the sum may be off because other values than those of `exact` were multiplied. NaN and infinity
    must be where `exact` has them.
    """
    dtype = got.dtype.name
    assert got.shape == exact.shape
    got = got.astype(np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    operands = np.broadcast_to(operands, exact.shape)[finite]
    got, exact, magnitude = got[finite], exact[finite], magnitude[finite]
    top = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), np.abs(got)), where=(exact != 0) | (got != 0),
                                   out=np.full(exact.shape, -1e4))))  # fmt: skip
    bound = (C * EPS * k + chain) * magnitude + np.maximum(HALF_ULP[dtype] * top, SMALLEST[dtype]) + operands
    error = np.abs(got - exact)
    worst = np.argmax(error - bound) if error.size else 0
    assert (error <= bound).all(), (
        f"error {error.flat[worst]:.3e} over the bound {bound.flat[worst]:.3e} at exact value {exact.flat[worst]:.6e}"
    )


def fp8_chain(backend: str) -> float:
    """`FP8_CHAIN` where the backend's folded products run on a GPU."""
    if backend == "torch":
        return FP8_CHAIN if import_module("torch").cuda.is_available() else 0
    return FP8_CHAIN if backend == "jax" and import_module("jax").default_backend() != "cpu" else 0


def m_grouped(got: Array, lhs: Array, rhs_t: Array, group_ends: Array, chain: float = 0) -> None:
    """`got` is lhs (M, K) x rhs_t (G, N, K) within the bound; the operands are the values multiplied."""
    exact = oracle.grouped_mm_bf16(lhs, rhs_t, group_ends, "float64")
    magnitude = oracle.grouped_mm_bf16(np.abs(lhs), np.abs(rhs_t), group_ends, "float64")
    gemm_bound(got, exact, magnitude, lhs.shape[1], chain)


def k_grouped(got: Array, lhs: Array, rhs: Array, group_ends: Array, chain: float = 0) -> None:
    """`got` is lhs (M, N) x rhs (M, K) -> (G, N, K) within the bound."""
    exact = oracle.grouped_wgrad_bf16(lhs, rhs, group_ends, "float64")
    magnitude = oracle.grouped_wgrad_bf16(np.abs(lhs), np.abs(rhs), group_ends, "float64")
    gemm_bound(got, exact, magnitude, lhs.shape[0], chain)


def sqnr_db(got: Array, want: Array) -> float:
    """10 log10 of signal over noise, in fp64; infinite when equal."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(np.sum(want**2) / np.sum((got - want) ** 2)))
