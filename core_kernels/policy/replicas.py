"""How often a token is sent to a rank that has several of its experts, and how often that rank returns its rows."""

from typing import Any, Literal, get_args

from ..launch import fail

Replicas = Literal["each", "once", "summed"]
"""each: a row per expert, both ways. once: one row per rank, copied there for its experts; their rows come back each,
and no byte of a result or a gradient changes. summed: one row per rank, and the rows of a token's experts on a rank are
summed there, so that one row comes back."""


def check_replicas_option(op: str, replicas: Any) -> None:
    """Raise ValueError unless it is one of `Replicas`."""
    if not isinstance(replicas, str) or replicas not in get_args(Replicas):
        fail(ValueError, op, "replicas", repr(replicas), f"allowed: {', '.join(map(repr, get_args(Replicas)))}")
