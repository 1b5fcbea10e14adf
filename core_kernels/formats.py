"""The MXFP8 number format: constants and the two ways to choose a block's scale.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 (formats) and 6 (conversion);
OCP 8-bit Floating Point Specification (OFP8) v1.0 for E4M3. RCEIL is what cuBLAS, cuDNN,
Transformer Engine and the sm_100 conversion instruction compute for finite blocks.
"""

from enum import Enum, IntEnum

from .launch import fail

BLOCK = 32
"""Values that share one scale (MX v1.0, section 5.2)."""
SPAN = 256
"""Tokens of one group, a chunk, that share one scale per row in a folded operand of a weight gradient."""
SQUARE = 128
"""Values of a row that share one fp32 scale in blockwise FP8; a weight has one per square of this side."""
SMALLEST_SCALE = 2.0**-126
"""The smallest blockwise scale: below it fp32 numbers are subnormal, and their reciprocals overflow."""
HEADROOM = 3
"""The scale exponent of a group's first span is raised by this much. A later span with a larger scale forces the GEMM
to rescale its accumulator. A GEMM takes 8% longer if 0.7% of its scales rise; a factor of 8 makes that rare on normal
and SwiGLU data. The price: underflow begins 2^12 instead of 2^15 below the largest value."""
WEIGHT_HEADROOM = 2
"""The scale exponent of a weight's row or column is raised by this much above the need of its first span. The scale is
then nearly always known before the rest is read. Of normal values none in a million lines has a larger block elsewhere.
With 1 instead of 2, 8% of the columns of 14336 rows have one if rows differ by a factor of 1.4. The price: the scale is
on average 2.1 to 2.5 times larger."""
GRADIENT_HEADROOM = 2
"""The scale exponent of a row of SwiGLU's gradients is raised by this much above the need of its first span. Of normal
dh, gate and up 2 in 1000 rows of 14336 have a larger block elsewhere; with Student's t, 4 degrees of freedom, 280.

The price is in data of which 32 of 7168 features are 2^e larger, and their weights as much smaller. A product then has
28.0 dB at e = 10 and 21.6 at 12 if these features are among the first 256; without headroom 28.0 at 12 and 21.2 at
14."""
MAX_HEADROOM = 7
"""An exponent. More would leave less than half of E4M3's 15 binades of normal numbers."""

E4M3_MAX = 448.0
"""Largest finite E4M3 value, S.1111.110 (OFP8 v1.0, table 2)."""
E4M3_NAN = 0x7F
"""S.1111.111: with its negative the only NaN of E4M3. E4M3 has no infinity."""
E4M3_EMAX = 8
"""Exponent of the largest E4M3 value: 448 = 1.75 * 2^8."""

E8M0_BIAS = 127
"""Byte b represents 2^(b - 127) (MX v1.0, section 5.4.1)."""
E8M0_NAN = 255
E8M0_MAX = 254

LOG2E = 1.44269502
"""log2(e). Kernels round it to fp32."""
EXP2_COEFFICIENTS = (0.69314698, 0.24022242, 0.05550734, 0.0096715, 0.00132647)
"""Coefficients of f, f^2, ..., f^5 of the degree-5 minimax polynomial for 2^f on [-1/2, 1/2]; the constant term is
exactly 1. The relative error is 1.1e-7. Kernels round the coefficients to fp32."""


class Rounding(IntEnum):
    """How a block's amax becomes its power-of-two scale.

    Attributes:
        RCEIL: the smallest power of two >= amax / 448, divided in fp32, so no element saturates. One quotient rounds
            down to a power of two: of amax = 0x1.c00002p-119, whose largest element saturates by 1 in 2^23.
        FLOOR: 2^(floor(log2(amax)) - 8); elements may saturate.

    Example:
        >>> Rounding.RCEIL, int(Rounding.FLOOR)
        (<Rounding.RCEIL: 0>, 1)

    Source:
        OCP Microscaling Formats (MX) Specification v1.0, section 6.3, for FLOOR.
    """

    RCEIL = 0
    FLOOR = 1

    @classmethod
    def parse(cls, value: "Rounding | str | Enum", op: str = "Rounding", argument: str = "rounding") -> "Rounding":
        """Return a Rounding from itself, from its name, or from the member of that name of another enumeration.

        Args:
            value: a Rounding; a name in any case (`"rceil"`, `"FLOOR"`); or a member of another enumeration, for
                example torchao's `ScaleCalculationMode`.
            op: the function that an error names.
            argument: the argument that an error names.

        Returns:
            The Rounding.

        Raises:
            ValueError: any other name.
            TypeError: any other type.

        Example:
            >>> Rounding.parse("floor")
            <Rounding.FLOOR: 1>
        """
        name = value.name if isinstance(value, Enum) else value
        if not isinstance(name, str):
            fail(TypeError, op, argument, repr(value), "allowed: a Rounding or its name")
        if name.upper() not in _ROUNDINGS:
            fail(ValueError, op, argument, repr(name), f"allowed: {', '.join(repr(n.lower()) for n in _ROUNDINGS)}")
        return _ROUNDINGS[name.upper()]


_ROUNDINGS = {mode.name: mode for mode in Rounding}
"""By name. torch.compile cannot trace the member table of an enumeration."""


def scale_attrs(op: str, rounding: int, satfinite: bool) -> dict[str, int]:
    """The attributes of a kernel that chooses scales.

    Args:
        op: the function that an error names.
        rounding: the number of a Rounding.
        satfinite: whether an infinite value gives the largest finite scale.

    Returns:
        The attributes by name, as integers.

    Raises:
        ValueError: another number.
        TypeError: other types.
    """
    if rounding not in tuple(Rounding):
        allowed = f"allowed: {', '.join(f'{m.value} ({m.name})' for m in Rounding)}"
        fail(ValueError if isinstance(rounding, int) else TypeError, op, "rounding", repr(rounding), allowed)
    if satfinite not in (False, True):
        fail(TypeError, op, "satfinite", repr(satfinite), "allowed: a bool")
    return {"rounding": int(rounding), "satfinite": int(satfinite)}


def headroom_attrs(op: str, headroom: int) -> dict[str, int]:
    """The attribute of a fold with a headroom.

    Args:
        op: the function that an error names.
        headroom: an exponent, 0 to MAX_HEADROOM.

    Returns:
        The attribute by name.

    Raises:
        ValueError: another number.
        TypeError: another type.
    """
    if isinstance(headroom, bool) or not isinstance(headroom, int):
        fail(TypeError, op, "headroom", repr(headroom), "allowed: an int")
    if not 0 <= headroom <= MAX_HEADROOM:
        fail(ValueError, op, "headroom", headroom, f"allowed: 0 to {MAX_HEADROOM}")
    return {"headroom": headroom}


def packed_width(k: int) -> int:
    """Bytes of one packed row `[q | sf]`: k elements, then k / 32 scales.

    Args:
        k: values of a row, a multiple of 32.

    Returns:
        Bytes.

    Example:
        >>> packed_width(64)
        66
    """
    return k + k // BLOCK


def spans(num_tokens: int, num_groups: int) -> int:
    """Number of slots for the spans of `num_tokens` tokens in `num_groups` groups, for any split of the tokens.

    Group g with tokens [begin, end) has ceil((end - begin) / SPAN) spans, from slot begin // SPAN + g on.

    Args:
        num_tokens: tokens of all groups, with padding.
        num_groups: groups, one per local expert.

    Returns:
        The number of slots.

    Example:
        >>> spans(1024, 2)
        6
    """
    return num_tokens // SPAN + num_groups
