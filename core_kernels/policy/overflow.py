"""What rows beyond the capacity of a rank become."""

from typing import Any, Literal, get_args

from ..launch import require_choice

OnOverflow = Literal["nan", "drop"]
"""nan: tokens with a lost row are NaN. drop: a lost row is zero in the sum of its token, and so is its gradient."""
OnOverflowOfPeers = Literal["rounds", "nan", "drop"]
"""rounds: they are rows of another round of the call, so that none is lost."""


def check_on_overflow(op: str, on_overflow: Any) -> None:
    """Check an argument.

    Args:
        op: the function that an error names.
        on_overflow: the argument of the user.

    Raises:
        ValueError: unless it is one of `OnOverflow`.
    """
    require_choice(op, "on_overflow", on_overflow, get_args(OnOverflow))
