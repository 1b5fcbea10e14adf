"""Number formats and groups in numpy, shared by the oracles of all families.

The oracles define the ops: slow, plain numpy, without code of the kernels. A family's oracle.py has one function per
op, with the op's name and argument order. q and sf are uint8, bf16 is `ml_dtypes.bfloat16`. Source: OCP Microscaling
Formats (MX) Specification v1.0 sections 5 and 6, OFP8 v1.0 section 5. The numerics contract chooses RCEIL and defines
the edge cases.
"""

import ml_dtypes
import numpy as np

from .formats import E4M3_EMAX, E4M3_MAX, E4M3_NAN, E8M0_BIAS, E8M0_MAX, E8M0_NAN, Rounding

Array = np.ndarray
Pair = tuple[Array, Array]
DTYPES = {name: np.dtype(name) for name in ("float32", "float64")} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def _e4m3_value(code: int) -> float:
    """S.EEEE.MMM with bias 7: subnormals are M * 2^-9, and 0x7F is the only NaN (OFP8 table 2)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.ldexp(8 + mantissa, exponent - 10) if exponent else np.ldexp(mantissa, -9)
    if code & E4M3_NAN == E4M3_NAN:
        return np.nan
    return float(-magnitude if code & 0x80 else magnitude)


E4M3_VALUES = np.array([_e4m3_value(code) for code in range(256)])
_MAGNITUDES = E4M3_VALUES[:E4M3_NAN]
_MIDPOINTS = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2


def to_e4m3(x: Array) -> Array:
    """fp64 -> E4M3 bytes: nearest value, ties to the even code, +-448 beyond the range, 0x7F for NaN."""
    magnitude = np.abs(x)
    below = np.searchsorted(_MIDPOINTS, magnitude, side="left")
    above = np.searchsorted(_MIDPOINTS, magnitude, side="right")  # differs from `below` only at a tie
    code = np.where(below % 2 == 0, below, above) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), E4M3_NAN, code).astype(np.uint8)


def e8m0_value(byte: Array) -> Array:
    """E8M0 bytes -> fp64 powers of two, 255 -> NaN."""
    return np.where(byte == E8M0_NAN, np.nan, np.ldexp(1.0, byte.astype(np.int32) - E8M0_BIAS))


def scale_byte(amax: Array, rounding: Rounding | str = Rounding.RCEIL, satfinite: bool = False) -> Array:
    """The E8M0 byte of a block from its fp32 amax.

    >>> scale_byte(np.float32([448, 449, 0]))  # 2^0, 2^1, the smallest scale
    array([127, 128,   0], dtype=uint8)
    """
    amax = np.asarray(amax, np.float32)
    finite = np.where(np.isfinite(amax), amax, np.float32(0))
    if Rounding.parse(rounding) is Rounding.RCEIL:
        # ratio = m * 2^e with m in [1/2, 1): the smallest power of two >= ratio is 2^e, or 2^(e-1) at m = 1/2
        ratio = finite / np.float32(E4M3_MAX)
        m, e = np.frexp(ratio)
        exponent = e - (m == 0.5)
    else:
        ratio = finite
        exponent = np.frexp(ratio)[1] - 1 - E4M3_EMAX
    byte = np.where(ratio == 0, 0, np.maximum(exponent + E8M0_BIAS, 0))
    byte = np.where(np.isinf(amax), E8M0_MAX if satfinite else E8M0_NAN, byte)
    return np.where(np.isnan(amax), E8M0_NAN, byte).astype(np.uint8)


def round_to(x: Array, dtype: str) -> Array:
    """fp64 -> float32 or bfloat16, rounded once to nearest even; float64 stays as it is."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "bfloat16":
            # 8 significant bits, none below 2^-133. A cast through fp32 would round twice.
            finite = np.where(np.isfinite(x), x, 0)
            ulp = np.ldexp(1.0, np.maximum(np.frexp(finite)[1] - 8, -133))
            x = np.where(np.isfinite(x), np.rint(finite / ulp) * ulp, x)
        return x.astype(DTYPES[dtype])


def group_slices(group_ends: Array) -> list[slice]:
    """The rows of each group."""
    return [slice(int(a), int(b)) for a, b in zip([0, *group_ends], group_ends, strict=False)]
