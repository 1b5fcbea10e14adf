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

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..formats import E4M3_NAN, Rounding
from ..oracle_math import to_e4m3
from .blocks import F32, LARGE, SIGN, ZERO_BITS, Aspect, Blocks
from .rules_element import (
    at_byte_0,
    away,
    beyond,
    element_rule,
    in_range,
    infinite_as_nan,
    is_zero,
    nan_block,
    of_the_others,
    over_zero,
    saturated,
    signed_nans,
    toward_zero,
    under,
    whole,
    without_subnormals,
)
from .rules_scale import ROUNDINGS, log2_in_its_dtype, rceil, scale_rule, small_rules


def aspects(rounding: str = "RCEIL") -> dict[str, Aspect]:
    """Name -> Aspect. rounding: the one of larger blocks, which smaller blocks may share."""
    base = ROUNDINGS.get(rounding, rceil)
    codes = {f"byte {byte}": whole(byte) for byte in (0, 1, 127, 105)}
    return {
        "scale": Aspect(
            lambda b: b.finite & (b.amax >= LARGE),
            {name: scale_rule(of) for name, of in ROUNDINGS.items()}
            | {"RCEIL by log(x) / log(2) in the dtype of x": log2_in_its_dtype},
        ),
        "small blocks": Aspect(lambda b: b.finite & (b.amax < LARGE) & (b.amax > 0), small_rules(base)),
        "zeros": Aspect(lambda b: b.amax == 0, codes),
        "elements": Aspect(
            lambda b: in_range(b) & (b.sf > 0)[:, None],
            {
                "to nearest, ties to even": element_rule(to_e4m3),
                "to nearest, ties away from zero": element_rule(away),
                "toward zero": element_rule(toward_zero),
                "E4M3 subnormals as zeros": element_rule(without_subnormals),
            },
        ),
        "sign of zero": Aspect(
            lambda b: in_range(b) & is_zero(b),
            {
                "kept": lambda b: (b.q == SIGN) == np.signbit(b.x),
                "positive": lambda b: b.q == 0,
                "lost where fp32(x / scale) is zero": lambda b: (b.q == SIGN) == (b.scaled.astype(F32) < 0),
            },
        ),
        "elements at byte 0": Aspect(
            at_byte_0,
            {
                "scale 2^-127": under(-127),
                "scale 2^-126": under(-126),
                "scale 1": under(0),
                "scale 2^-127, ties away from zero": under(-127, away),
                "scale 0 and subnormal numbers as zeros": over_zero,
            },
        ),
        "overflow": Aspect(
            lambda b: beyond(b) & (b.sf > 0)[:, None],
            {
                "saturates": lambda b: b.q == (0x7E | np.where(np.signbit(b.x), SIGN, 0)),
                "NaN": lambda b: b.q & ZERO_BITS == E4M3_NAN,
            },
        ),
        "infinity": Aspect(
            lambda b: np.isinf(b.amax),
            {
                "NaN block": whole(255, nan_block),
                "byte 254, saturated": whole(254, saturated(127)),
                "byte 254, NaN for an infinity": whole(254, infinite_as_nan(127)),
                "byte 247, saturated": whole(247, saturated(120)),
                "byte 247, NaN for an infinity": whole(247, infinite_as_nan(120)),
                "byte 255, elements of any bytes": whole(255),
            },
        ),
        "NaN": Aspect(
            lambda b: np.isnan(b.amax),
            {
                "NaN block": whole(255, nan_block),
                "NaN block, elements with their sign": whole(255, signed_nans),
                "byte 0, elements of any bytes": whole(0),
                "byte 254, elements of any bytes": whole(254),
                "scale without the NaN, which is 0x7F": of_the_others(base, False),
                "scale without the NaN, which keeps its sign": of_the_others(base, True),
                "byte 255, elements of any bytes": whole(255),
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
