"""Blocks of a quantizer, and what a rule is: a function that says which bytes obey."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ..oracle_math import Array, e8m0_value

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
