"""What a row beyond the capacity of a buffer makes of its token."""

from typing import Any, Literal, get_args

from ..launch import fail

OnOverflow = Literal["nan", "drop"]
"""nan: tokens with a lost row are NaN. drop: a lost row is zero in the sum of its token, and so is its gradient."""


def check_on_overflow(op: str, on_overflow: Any) -> None:
    """Check an argument.

    Args:
        op: the function that an error names.
        on_overflow: the argument of the user.

    Raises:
        ValueError: unless it is one of `OnOverflow`.
    """
    if not isinstance(on_overflow, str) or on_overflow not in get_args(OnOverflow):
        allowed = f"allowed: {', '.join(map(repr, get_args(OnOverflow)))}"
        fail(ValueError, op, "on_overflow", repr(on_overflow), allowed)
