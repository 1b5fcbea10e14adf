"""Rules of elements, and of blocks with an infinity or a NaN."""

from collections.abc import Callable

import numpy as np

from ..formats import E4M3_NAN
from ..oracle_math import Array, e8m0_value, to_e4m3
from .blocks import F32, LAST_IN_RANGE, SIGN, ZERO_BITS, Blocks, Rule


def away(x: Array) -> Array:
    """Nearest, ties away from zero: half an ulp less than a tie rounds to nearest."""
    code = to_e4m3(np.nextafter(np.abs(x), np.inf))
    return code | np.where(np.signbit(x), SIGN, 0).astype(np.uint8)


def toward_zero(x: Array) -> Array:
    exponent = np.maximum(np.frexp(x)[1] - 4, -9)
    return to_e4m3(np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent))


def element_rule(rounded: Callable[[Array], Array]) -> Rule:
    """The magnitude; the sign of a zero is an aspect of its own."""

    def obeys(b: Blocks) -> Array:
        x = np.where(np.abs(b.scaled) <= LAST_IN_RANGE, b.scaled, 0)
        want = rounded(x)
        return (b.q == want) | ((want & ZERO_BITS == 0) & (b.q & ZERO_BITS == 0))

    return obeys


def without_subnormals(x: Array) -> Array:
    return to_e4m3(np.where(np.abs(x) < 2.0**-6, 0, x))


def under(exponent: int, rounded: Callable[[Array], Array] = to_e4m3) -> Rule:
    """Elements of byte 0 under 2^exponent."""

    def obeys(b: Blocks) -> Array:
        with np.errstate(over="ignore"):
            want = rounded(b.x.astype(np.float64) / 2.0**exponent)
        return (b.q == want) | ((want & ZERO_BITS == 0) & (b.q & ZERO_BITS == 0))

    return obeys


def is_zero(b: Blocks) -> Array:
    return b.q & ZERO_BITS == 0


def in_range(b: Blocks) -> Array:
    return b.finite[:, None] & (b.sf < 255)[:, None] & (np.abs(b.scaled) <= LAST_IN_RANGE)


def beyond(b: Blocks) -> Array:
    return b.finite[:, None] & (b.sf < 255)[:, None] & (np.abs(b.scaled) > LAST_IN_RANGE)


def at_byte_0(b: Blocks) -> Array:
    return b.finite[:, None] & (b.sf == 0)[:, None]


def over_zero(b: Blocks) -> Array:
    """Subnormal numbers are zeros, the smallest scale too: 0 / 0 is NaN, other quotients are infinite and saturate."""
    zero = np.abs(b.x) < np.finfo(F32).tiny
    return np.where(zero, b.q & ZERO_BITS == E4M3_NAN, b.q & ZERO_BITS == 0x7E)


# --- infinity and NaN -----------------------------------------------------------------------------------------------


def whole(sf: int, q: Callable[[Blocks], Array] | None = None) -> Rule:
    def obeys(b: Blocks) -> Array:
        same = b.sf == sf
        return same if q is None else same & (b.q == q(b)).all(-1)

    return obeys


def saturated(exponent: int) -> Callable[[Blocks], Array]:
    def elements(b: Blocks) -> Array:
        with np.errstate(invalid="ignore"):
            return to_e4m3(b.x.astype(np.float64) / 2.0**exponent)

    return elements


def infinite_as_nan(exponent: int) -> Callable[[Blocks], Array]:
    return lambda b: np.where(np.isinf(b.x), E4M3_NAN | (b.q & SIGN), saturated(exponent)(b))


def of_the_others(base: Callable[[Array], Array], signed: bool) -> Rule:
    """The scale of the elements that are no NaN. Blocks with an infinity too have any bytes."""

    def obeys(b: Blocks) -> Array:
        others = np.where(np.isnan(b.x), F32(0), b.x)
        sf = base(np.abs(others).max(-1))
        with np.errstate(invalid="ignore"):
            want = to_e4m3(others.astype(np.float64) / e8m0_value(sf)[:, None])
        nan = E4M3_NAN | np.where(signed & np.signbit(b.x), SIGN, 0)
        q = (b.q == np.where(np.isnan(b.x), nan, want)).all(-1)
        return (b.sf == sf) & q | np.isinf(others).any(-1)

    return obeys


def nan_block(b: Blocks) -> Array:
    return np.full(b.q.shape, E4M3_NAN, np.uint8)


def signed_nans(b: Blocks) -> Array:
    """NaN elements keep their sign."""
    return E4M3_NAN | np.where(np.signbit(b.x), SIGN, 0).astype(np.uint8)
