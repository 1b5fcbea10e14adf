"""Rules of scales: how the amax of a block becomes its E8M0 byte."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from ..formats import E4M3_EMAX, E4M3_MAX, E8M0_BIAS, Rounding
from ..oracle_math import Array, scale_byte
from .blocks import F32, Blocks, Rule


def finite_amax(amax: Array) -> Array:
    return np.where(np.isfinite(amax), amax, F32(0)).astype(F32)


def rceil(amax: Array) -> Array:
    return scale_byte(finite_amax(amax), Rounding.RCEIL)


def floor(amax: Array) -> Array:
    return scale_byte(finite_amax(amax), Rounding.FLOOR)


def _log2_bytes(x: Array, rounded: Callable, less: int) -> Array:
    with np.errstate(divide="ignore"):
        e = rounded(np.log2(np.where(x == 0, F32(1), x).astype(F32)))
    return np.where(x == 0, 0, np.clip(e - less + E8M0_BIAS, 0, 254)).astype(np.uint8)


def _rceil_by_log2(amax: Array) -> Array:
    return _log2_bytes(finite_amax(amax) / F32(E4M3_MAX), np.ceil, 0)


def _floor_by_log2(amax: Array) -> Array:
    return _log2_bytes(finite_amax(amax), np.floor, E4M3_EMAX)


def _ceil(amax: Array) -> Array:
    m, e = np.frexp(finite_amax(amax))
    return np.where(m == 0, 0, np.clip(e - (m == 0.5) - E4M3_EMAX + E8M0_BIAS, 0, 254)).astype(np.uint8)


def _even(amax: Array) -> Array:
    """amax rounded to the four significant bits of E4M3, half up, then FLOOR."""
    rounded = (finite_amax(amax).view(np.uint32) + np.uint32(1 << 19)) & np.uint32(0x7F800000)
    return np.clip((rounded >> 23).astype(np.int32) - E4M3_EMAX, 0, 254).astype(np.uint8)


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "RCEIL": rceil,
    "FLOOR": floor,
    "EVEN": _even,
    "CEIL": _ceil,
    "RCEIL by fp32 log2": _rceil_by_log2,
    "FLOOR by fp32 log2": _floor_by_log2,
}
TEXT = {
    "RCEIL": "the smallest power of two >= fp32(amax / 448)",
    "FLOOR": "2^(floor(log2(amax)) - 8)",
    "EVEN": "FLOOR of amax rounded to 4 bits",
    "CEIL": "2^(ceil(log2(amax)) - 8)",
}


def log2_in_its_dtype(b: Blocks) -> Array:
    """As log(quotient) / log(2), each step rounded to the dtype of x. Values of bf16 are taken as bf16."""
    of_bf16 = (b.x.view(np.uint32) & 0xFFFF == 0).all(-1)

    def rounded(x: Array) -> Array:
        return np.where(of_bf16, x.astype(ml_dtypes.bfloat16).astype(F32), x)

    log = rounded(np.log(rounded(finite_amax(b.amax) / F32(E4M3_MAX))))
    exponent = np.ceil(rounded(log / rounded(np.full(len(log), np.log(2), F32))))
    return b.sf == np.clip(exponent + E8M0_BIAS, 0, 254)


def scale_rule(of: Callable[[Array], Array]) -> Rule:
    return lambda b: b.sf == of(b.amax)


def small_rules(base: Callable[[Array], Array]) -> dict[str, Rule]:
    """base: the rounding of larger blocks."""

    def ratio(b: Blocks) -> Array:
        return finite_amax(b.amax) / F32(E4M3_MAX)

    def flushed(b: Blocks) -> Array:
        """Subnormal inputs and quotients are zeros."""
        least = np.finfo(F32).tiny
        seen = np.where(b.amax < least, F32(0), b.amax)
        lost = (ratio(b) < least) if base is not floor else seen == 0
        return b.sf == np.where(lost, 0, base(seen))

    def stepped(b: Blocks) -> Array:
        """A quotient below 2^-126 has byte 1, since its exponent field is 0 and its fraction is not."""
        return b.sf == np.where(ratio(b) > 0, np.maximum(base(b.amax), 1), 0)

    def exact(b: Blocks) -> Array:
        m, e = np.frexp(b.amax.astype(np.float64) / E4M3_MAX)
        return b.sf == np.where(b.amax == 0, 0, np.clip(e - (m == 0.5) + E8M0_BIAS, 0, 254))

    return {
        "same rounding, down to byte 0": lambda b: b.sf == base(b.amax),
        "same rounding, of the exact quotient": exact,
        "same rounding, down to byte 1": lambda b: b.sf == np.maximum(base(b.amax), 1),
        "byte 1 for quotients up to 2^-127": stepped,
        "same rounding, subnormal numbers as zeros": flushed,
        "amax at least 1e-4": lambda b: b.sf == base(np.maximum(b.amax, F32(1e-4))),
        "scale 1 for quotients below 2^-63": lambda b: b.sf == np.where(ratio(b) < F32(2.0**-63), 127, base(b.amax)),
    }
