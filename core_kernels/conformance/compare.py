"""The comparisons: bytes, the error bound of a matrix product, and SQNR in dB. Arrays are numpy's."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np

Array = np.ndarray
EPS = 2.0**-23  # fp32
BF16 = np.dtype(ml_dtypes.bfloat16)
HALF_ULP = 2.0**-8  # of bf16, relative to the power of two at or below a value
SMALLEST = {"bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 0.0}  # half of the smallest subnormal


class DifferentError(AssertionError):
    """Two arrays differ.

    Attributes:
        output: the number of the output. index: of the first value that differs, () if shapes or dtypes do.
    """

    def __init__(self, message: str, output: int, index: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.output, self.index = output, index


def bits(x: Array) -> Array:
    """The same bytes as unsigned integers."""
    return x if x.dtype.kind in "iu" else x.view(f"u{x.itemsize}")


def show_bits(value: int, dtype: np.dtype) -> str:
    """A byte in binary, other values in hexadecimal."""
    if dtype.itemsize == 1:
        return f"{value:08b}"
    return f"0x{value & (1 << 8 * dtype.itemsize) - 1:0{2 * dtype.itemsize}x}"


def same_bytes(got: Sequence[Array], want: Sequence[Array]) -> None:
    """Raise DifferentError unless all arrays agree in shape, dtype and bits. A NaN equals any NaN of its dtype."""
    if len(got) != len(want):
        raise DifferentError(f"{len(got)} outputs, expected {len(want)}", min(len(got), len(want)))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if (g.shape, g.dtype) != (w.shape, w.dtype):
            raise DifferentError(f"output {i}: {g.dtype}{list(g.shape)}, expected {w.dtype}{list(w.shape)}", i)
        g, w = np.ascontiguousarray(g), np.ascontiguousarray(w)
        differ = bits(g) != bits(w)
        if g.dtype.kind not in "iu":
            differ &= ~(np.isnan(g.astype(np.float32)) & np.isnan(w.astype(np.float32)))
        if differ.any():
            at = tuple(map(int, np.unravel_index(int(np.argmax(differ)), g.shape)))
            found, expected = (show_bits(int(bits(x)[at]), x.dtype) for x in (g, w))
            count = f"output {i}: {int(differ.sum())} of {g.size} values differ"
            raise DifferentError(f"{count}, the first at {at}: {found} ({g[at]}), expected {expected} ({w[at]})", i, at)


def gemm_bound(
    got: Array, exact: Array, magnitude: Array, k: Array | int, chain: float = 0, operands: Array | float = 0
) -> None:
    """Raise AssertionError unless |got - exact| <= (2^-23 k + chain) sum|a||b| + rounding + operands.

    exact: the fp64 sum. magnitude: sum|a||b|. k: terms of the sum, or of each sum. rounding: for bf16 half an ulp of
    `exact`; none for fp32, whose last rounding is one of the sum's. chain: the loss of FP8 tensor cores, relative to
    sum|a||b|. operands: the error of the sum that is allowed because the factors differ from the factors of `exact`.
    NaN and infinity must be where `exact` has them.

    An fp32 sum s in any order has |s - exact| <= 2^-24 k sum|a||b|, half of the first term. The other half covers
    exact products that fp32 rounds, and a bf16 rounding of s above a power of two with `exact` below it: then either
    got is that power of two and no further from exact than s, or half an ulp is less than s - exact.
    """
    dtype = got.dtype.name
    assert got.shape == exact.shape, f"shape {got.shape}, expected {exact.shape}"
    got = got.astype(np.float64)
    finite = np.isfinite(exact)
    differ = (~finite | ~np.isfinite(got)) & (got != exact) & ~(np.isnan(got) & np.isnan(exact))
    if differ.any():
        at = tuple(map(int, np.unravel_index(int(np.argmax(differ)), got.shape)))
        count = f"{int(differ.sum())} of {got.size} values differ in NaN or infinity"
        raise AssertionError(f"{count}, the first at {at}: {got[at]:.6g}, expected {exact[at]:.6g}")
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


def sqnr_db(got: Array, want: Array) -> float:
    """10 log10 of sum(want^2) / sum((got - want)^2), in fp64; infinite for equal arrays."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    error = np.sum((got - want) ** 2)
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(np.sum(want**2) / error)) if error else np.inf
