"""How often a token is sent to a rank that has several of its experts, and how often that rank returns its rows."""

from typing import Any, Literal

from ..launch import require_choice

Deduplicate = Literal["dispatch", "both"] | None
"""None: a row per expert, both ways. "dispatch": one row per rank, copied there for its experts; a row per expert comes
back, and no byte of a result or a gradient changes. "both": one row per rank, and the rows of a token's experts on a
rank are summed there, so that one row comes back."""
CHOICES: tuple[Deduplicate, ...] = (None, "dispatch", "both")


def check_deduplicate(op: str, deduplicate: Any) -> None:
    """Check an argument.

    Args:
        op: the function that an error names.
        deduplicate: the argument of the user.

    Raises:
        ValueError: unless it is one of `Deduplicate`.
    """
    require_choice(op, "deduplicate", deduplicate, CHOICES)
