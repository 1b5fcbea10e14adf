"""Which rules the blocks of a quantizer obey. An aspect judges some of the bytes; for each there are several rules.

aspect               bytes
scale                scales of finite blocks with amax >= 2^-13
small blocks         scales of other finite blocks
zeros                scales of blocks of zeros
elements             elements in range: |x / scale| <= 464, which round to 448 or less; scale byte 1 or more
sign of zero         the sign of elements that round to zero
elements at byte 0   elements under the smallest scale
overflow             elements beyond the range; scale byte 1 or more
infinity             scales and elements of blocks with an infinity and no NaN
NaN                  scales and elements of blocks with a NaN

Elements are judged under the scale that the quantizer wrote, so that a wrong scale is one broken rule and not two.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ..formats import E4M3_EMAX, E4M3_MAX, E4M3_NAN, E8M0_BIAS, Rounding
from ..oracle_math import Array, e8m0_value, scale_byte, to_e4m3

F32 = np.float32
LARGE = F32(2.0**-13)
"""From here on every rounding has its scale without a smallest value."""
ZERO_BITS, SIGN = 0x7F, 0x80
LAST_IN_RANGE = 464.0
"""Halfway between 448 and 480, which E4M3 does not have; the tie goes to 448."""


class Blocks(NamedTuple):
    """x (B, 32) fp32; q (B, 32), sf (B,) uint8."""

    x: Array
    q: Array
    sf: Array

    @property
    def amax(self) -> Array:
        """(B,), NaN of a block with a NaN."""
        return np.max(np.abs(self.x), axis=-1)

    @property
    def finite(self) -> Array:
        """(B,) bool."""
        return np.all(np.isfinite(self.x), axis=-1)

    @property
    def scaled(self) -> Array:
        """(B, 32) fp64: x under the scale that was written."""
        with np.errstate(all="ignore"):
            return self.x.astype(np.float64) / e8m0_value(self.sf)[:, None]


Rule = Callable[[Blocks], Array]
"""Blocks -> (B,) or (B, 32) bool: whether a scale or an element obeys. Only the bytes of the aspect count."""


class Aspect(NamedTuple):
    """judged: (B,) bool of scales and blocks, or (B, 32) bool of elements. rules: name -> Rule."""

    judged: Callable[[Blocks], Array]
    rules: Mapping[str, Rule]


# --- scales ------------------------------------------------------------------------------------------------


def _finite_amax(amax: Array) -> Array:
    return np.where(np.isfinite(amax), amax, F32(0)).astype(F32)


def rceil(amax: Array) -> Array:
    return scale_byte(_finite_amax(amax), Rounding.RCEIL)


def floor(amax: Array) -> Array:
    return scale_byte(_finite_amax(amax), Rounding.FLOOR)


def _log2_bytes(x: Array, rounded: Callable, less: int) -> Array:
    with np.errstate(divide="ignore"):
        e = rounded(np.log2(np.where(x == 0, F32(1), x).astype(F32)))
    return np.where(x == 0, 0, np.clip(e - less + E8M0_BIAS, 0, 254)).astype(np.uint8)


def _rceil_by_log2(amax: Array) -> Array:
    return _log2_bytes(_finite_amax(amax) / F32(E4M3_MAX), np.ceil, 0)


def _floor_by_log2(amax: Array) -> Array:
    return _log2_bytes(_finite_amax(amax), np.floor, E4M3_EMAX)


def _ceil(amax: Array) -> Array:
    m, e = np.frexp(_finite_amax(amax))
    return np.where(m == 0, 0, np.clip(e - (m == 0.5) - E4M3_EMAX + E8M0_BIAS, 0, 254)).astype(np.uint8)


def _even(amax: Array) -> Array:
    """amax rounded to the four significant bits of E4M3, half up, then FLOOR."""
    rounded = (_finite_amax(amax).view(np.uint32) + np.uint32(1 << 19)) & np.uint32(0x7F800000)
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


def _log2_in_its_dtype(b: Blocks) -> Array:
    """As log(quotient) / log(2), each step rounded to the dtype of x. Values of bf16 are taken as bf16."""
    of_bf16 = (b.x.view(np.uint32) & 0xFFFF == 0).all(-1)

    def rounded(x: Array) -> Array:
        return np.where(of_bf16, x.astype(ml_dtypes.bfloat16).astype(F32), x)

    log = rounded(np.log(rounded(_finite_amax(b.amax) / F32(E4M3_MAX))))
    exponent = np.ceil(rounded(log / rounded(np.full(len(log), np.log(2), F32))))
    return b.sf == np.clip(exponent + E8M0_BIAS, 0, 254)


def _scale(of: Callable[[Array], Array]) -> Rule:
    return lambda b: b.sf == of(b.amax)


def _small_rules(base: Callable[[Array], Array]) -> dict[str, Rule]:
    """base: the rounding of larger blocks."""

    def ratio(b: Blocks) -> Array:
        return _finite_amax(b.amax) / F32(E4M3_MAX)

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


# --- elements ----------------------------------------------------------------------------------------------


def _away(x: Array) -> Array:
    """Nearest, ties away from zero: half an ulp less than a tie rounds to nearest."""
    code = to_e4m3(np.nextafter(np.abs(x), np.inf))
    return code | np.where(np.signbit(x), SIGN, 0).astype(np.uint8)


def _toward_zero(x: Array) -> Array:
    exponent = np.maximum(np.frexp(x)[1] - 4, -9)
    return to_e4m3(np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent))


def _element(rounded: Callable[[Array], Array]) -> Rule:
    """The magnitude; the sign of a zero is an aspect of its own."""

    def obeys(b: Blocks) -> Array:
        x = np.where(np.abs(b.scaled) <= LAST_IN_RANGE, b.scaled, 0)
        want = rounded(x)
        return (b.q == want) | ((want & ZERO_BITS == 0) & (b.q & ZERO_BITS == 0))

    return obeys


def _without_subnormals(x: Array) -> Array:
    return to_e4m3(np.where(np.abs(x) < 2.0**-6, 0, x))


def _under(exponent: int, rounded: Callable[[Array], Array] = to_e4m3) -> Rule:
    """Elements of byte 0 under 2^exponent."""

    def obeys(b: Blocks) -> Array:
        with np.errstate(over="ignore"):
            want = rounded(b.x.astype(np.float64) / 2.0**exponent)
        return (b.q == want) | ((want & ZERO_BITS == 0) & (b.q & ZERO_BITS == 0))

    return obeys


def _is_zero(b: Blocks) -> Array:
    return b.q & ZERO_BITS == 0


def _in_range(b: Blocks) -> Array:
    return b.finite[:, None] & (b.sf < 255)[:, None] & (np.abs(b.scaled) <= LAST_IN_RANGE)


def _beyond(b: Blocks) -> Array:
    return b.finite[:, None] & (b.sf < 255)[:, None] & (np.abs(b.scaled) > LAST_IN_RANGE)


def _at_byte_0(b: Blocks) -> Array:
    return b.finite[:, None] & (b.sf == 0)[:, None]


def _over_zero(b: Blocks) -> Array:
    """Subnormal numbers are zeros, the smallest scale too: 0 / 0 is NaN, other quotients are infinite and saturate."""
    zero = np.abs(b.x) < np.finfo(F32).tiny
    return np.where(zero, b.q & ZERO_BITS == E4M3_NAN, b.q & ZERO_BITS == 0x7E)


# --- infinity and NaN --------------------------------------------------------------------------------------


def _whole(sf: int, q: Callable[[Blocks], Array] | None = None) -> Rule:
    def obeys(b: Blocks) -> Array:
        same = b.sf == sf
        return same if q is None else same & (b.q == q(b)).all(-1)

    return obeys


def _saturated(exponent: int) -> Callable[[Blocks], Array]:
    def elements(b: Blocks) -> Array:
        with np.errstate(invalid="ignore"):
            return to_e4m3(b.x.astype(np.float64) / 2.0**exponent)

    return elements


def _infinite_as_nan(exponent: int) -> Callable[[Blocks], Array]:
    return lambda b: np.where(np.isinf(b.x), E4M3_NAN | (b.q & SIGN), _saturated(exponent)(b))


def _of_the_others(base: Callable[[Array], Array], signed: bool) -> Rule:
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


def _nan_block(b: Blocks) -> Array:
    return np.full(b.q.shape, E4M3_NAN, np.uint8)


def _signed_nans(b: Blocks) -> Array:
    """NaN elements keep their sign."""
    return E4M3_NAN | np.where(np.signbit(b.x), SIGN, 0).astype(np.uint8)


def aspects(rounding: str = "RCEIL") -> dict[str, Aspect]:
    """Name -> Aspect. rounding: the one of larger blocks, which smaller blocks may share."""
    base = ROUNDINGS.get(rounding, rceil)
    codes = {f"byte {byte}": _whole(byte) for byte in (0, 1, 127, 105)}
    return {
        "scale": Aspect(
            lambda b: b.finite & (b.amax >= LARGE),
            {name: _scale(of) for name, of in ROUNDINGS.items()}
            | {"RCEIL by log(x) / log(2) in the dtype of x": _log2_in_its_dtype},
        ),
        "small blocks": Aspect(lambda b: b.finite & (b.amax < LARGE) & (b.amax > 0), _small_rules(base)),
        "zeros": Aspect(lambda b: b.amax == 0, codes),
        "elements": Aspect(
            lambda b: _in_range(b) & (b.sf > 0)[:, None],
            {
                "to nearest, ties to even": _element(to_e4m3),
                "to nearest, ties away from zero": _element(_away),
                "toward zero": _element(_toward_zero),
                "E4M3 subnormals as zeros": _element(_without_subnormals),
            },
        ),
        "sign of zero": Aspect(
            lambda b: _in_range(b) & _is_zero(b),
            {
                "kept": lambda b: (b.q == SIGN) == np.signbit(b.x),
                "positive": lambda b: b.q == 0,
                "lost where fp32(x / scale) is zero": lambda b: (b.q == SIGN) == (b.scaled.astype(F32) < 0),
            },
        ),
        "elements at byte 0": Aspect(
            _at_byte_0,
            {
                "scale 2^-127": _under(-127),
                "scale 2^-126": _under(-126),
                "scale 1": _under(0),
                "scale 2^-127, ties away from zero": _under(-127, _away),
                "scale 0 and subnormal numbers as zeros": _over_zero,
            },
        ),
        "overflow": Aspect(
            lambda b: _beyond(b) & (b.sf > 0)[:, None],
            {
                "saturates": lambda b: b.q == (0x7E | np.where(np.signbit(b.x), SIGN, 0)),
                "NaN": lambda b: b.q & ZERO_BITS == E4M3_NAN,
            },
        ),
        "infinity": Aspect(
            lambda b: np.isinf(b.amax),
            {
                "NaN block": _whole(255, _nan_block),
                "byte 254, saturated": _whole(254, _saturated(127)),
                "byte 254, NaN for an infinity": _whole(254, _infinite_as_nan(127)),
                "byte 247, saturated": _whole(247, _saturated(120)),
                "byte 247, NaN for an infinity": _whole(247, _infinite_as_nan(120)),
                "byte 255, elements of any bytes": _whole(255),
            },
        ),
        "NaN": Aspect(
            lambda b: np.isnan(b.amax),
            {
                "NaN block": _whole(255, _nan_block),
                "NaN block, elements with their sign": _whole(255, _signed_nans),
                "byte 0, elements of any bytes": _whole(0),
                "byte 254, elements of any bytes": _whole(254),
                "scale without the NaN, which is 0x7F": _of_the_others(base, False),
                "scale without the NaN, which keeps its sign": _of_the_others(base, True),
                "byte 255, elements of any bytes": _whole(255),
            },
        ),
    }


class Verdict(NamedTuple):
    """judged: blocks with a byte of the aspect. obeying: rule -> blocks whose bytes all obey. first: rule -> the number
    of the first block that breaks it."""

    judged: int
    obeying: dict[str, int]
    first: dict[str, int]

    @property
    def obeyed(self) -> list[str]:
        """The rules that all blocks obey; where there is no block, none."""
        return [rule for rule, count in self.obeying.items() if self.judged and count == self.judged]

    @property
    def best(self) -> str:
        """The rule that most blocks obey, "" where no block was judged."""
        return max(self.obeying, key=self.obeying.__getitem__) if self.judged else ""


@np.errstate(all="ignore")
def judge(blocks: Blocks, names: Iterable[str] = ()) -> dict[str, Verdict]:
    """Aspect -> Verdict. names: some aspects, of which "scale" is the first; all by default."""
    found: dict[str, Verdict] = {}
    for name in names or aspects():
        aspect = aspects(found["scale"].best if "scale" in found else "RCEIL")[name]
        judged = aspect.judged(blocks)
        at = np.flatnonzero(judged if judged.ndim == 1 else judged.any(-1))
        some, judged = Blocks(*(part[at] for part in blocks)), judged[at]
        obeying, first = {}, {}
        for rule, obeys in aspect.rules.items() if len(at) else ():
            kept = obeys(some) | ~judged
            kept = kept if kept.ndim == 1 else kept.all(-1)
            obeying[rule] = int(kept.sum())
            if not kept.all():
                first[rule] = int(at[np.argmin(kept)])
        found[name] = Verdict(len(at), obeying, first)
    return found


def as_defined(rounding: Rounding, satfinite: bool) -> dict[str, str]:
    """The rules of the definition: aspect -> rule."""
    return {
        "scale": rounding.name,
        "small blocks": "same rounding, down to byte 0",
        "zeros": "byte 0",
        "elements": "to nearest, ties to even",
        "sign of zero": "kept",
        "elements at byte 0": "scale 2^-127",
        "overflow": "saturates",
        "infinity": "byte 254, saturated" if satfinite else "NaN block",
        "NaN": "NaN block",
    }


@np.errstate(all="ignore")
def broken_aspect(blocks: Blocks, block: int, rounding: Rounding, satfinite: bool) -> str:
    """The aspect of the first byte of a block that does not obey the definition; "" if all do."""
    one = Blocks(*(part[block : block + 1] for part in blocks))
    for name, rule in as_defined(rounding, satfinite).items():
        aspect = aspects(rounding.name)[name]
        if (~aspect.rules[rule](one) & aspect.judged(one)).any():
            return name
    return ""
