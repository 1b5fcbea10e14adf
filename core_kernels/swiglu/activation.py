"""The numbers of SwiGLU, as a user gives them and as kernels take them.

SwiGLU(alpha, limit, offset) --attributes--> options of an op --swiglu_attrs--> the bits of three fp32, as integers
"""

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

from ..launch import fail

LARGEST_ALPHA = 64.0
"""The CUDA kernels' table of sigmoids reaches from 2^-25 / alpha to 88 / alpha, both in bf16's range."""
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
"""A limit between them is a normal fp32."""


class Numbers(NamedTuple):
    """The options of an op. A limit of 0 is none.

    Attributes:
        alpha: of `SwiGLU`.
        limit: of `SwiGLU`; 0 for None.
        offset: of `SwiGLU`.
    """

    alpha: float
    limit: float
    offset: float


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """(up + offset) * gate * sigmoid(alpha * gate), after gate and up are clamped.

    Args:
        alpha: the slope of the sigmoid, 1/64 to 64.
        limit: gate is at most `limit`, up is in [-limit, limit]; a number above 0, or None for no limit. A value
            outside has gradient zero, the limit itself has the full gradient, as torch.clamp has.
        offset: is added to the clamped up.

    Raises:
        TypeError: a value that is no number.
        ValueError: a number that is out of range.

    Example:
        >>> SwiGLU()  # silu(gate) * up
        SwiGLU(alpha=1.0, limit=None, offset=0.0)
        >>> gpt_oss = SwiGLU(alpha=1.702, limit=7.0, offset=1.0)

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020; OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025,
        section 2.2.
    """

    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.limit, int | float) and self.limit == 0:
            fail(ValueError, "SwiGLU", "limit", repr(self.limit), "allowed: above 0, or None for no limit")
        swiglu_attrs("SwiGLU", *self.attributes)

    @property
    def attributes(self) -> Numbers:
        return Numbers(self.alpha, 0.0 if self.limit is None else self.limit, self.offset)

    @classmethod
    def check(cls, op: str, activation: object) -> "SwiGLU":
        """Return the activation, if it is a SwiGLU.

        Args:
            op: the function that an error names.
            activation: the argument of the user.

        Returns:
            `activation`.

        Raises:
            TypeError: unless it is a SwiGLU.

        Example:
            >>> SwiGLU.check("grouped_swiglu_ffn", SwiGLU(limit=7.0)).limit
            7.0
        """
        if not isinstance(activation, cls):
            fail(TypeError, op, "activation", repr(activation), "allowed: a SwiGLU")
        return activation


def swiglu_attrs(op: str, alpha: float, limit: float, offset: float) -> dict[str, int]:
    """The attributes of a kernel: alpha, limit and offset as the bits of fp32; no limit is infinity.

    Args:
        op: the function that an error names.
        alpha: 1/64 to 64.
        limit: 2^-126 to 2^127, or 0 for no limit.
        offset: 2^-126 to 2^127 or their negatives, or 0. Smaller offsets are zero to some threads, and not to others.

    Returns:
        The attributes by name, as integers.

    Raises:
        TypeError: a value that is no number.
        ValueError: a number that is out of range.
    """
    for name, value in (("alpha", alpha), ("limit", limit), ("offset", offset)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            fail(TypeError, op, name, repr(value), "allowed: a float")
    if not 1 / LARGEST_ALPHA <= alpha <= LARGEST_ALPHA:
        fail(ValueError, op, "alpha", alpha, f"allowed: 1/{LARGEST_ALPHA:.0f} to {LARGEST_ALPHA:.0f}")
    if limit and not _SMALLEST <= limit <= _LARGEST:
        fail(ValueError, op, "limit", limit, "allowed: 2^-126 to 2^127; an op takes 0 for no limit, SwiGLU takes None")
    if offset and not _SMALLEST <= abs(offset) <= _LARGEST:
        fail(ValueError, op, "offset", offset, "allowed: 2^-126 to 2^127 or their negatives, or 0")
    # -0.0 + 0.0 is 0.0: an offset of zero has one form.
    values = {"alpha": alpha, "limit": limit or math.inf, "offset": offset + 0.0}
    return {name: struct.unpack("<I", struct.pack("<f", value))[0] for name, value in values.items()}


PLAIN = SwiGLU()
"""silu(gate) * up."""
