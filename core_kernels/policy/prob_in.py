"""The place where a layer multiplies a row by its probability; moe.py of a frontend has the formula of each."""

from typing import Any, Literal, get_args

from ..launch import require_choice

ProbIn = Literal["combine", "swiglu", "input"]
"""The sum of the experts' outputs, the experts' SwiGLU, or the experts' input."""


def check_prob_in(op: str, prob_in: Any) -> None:
    """Check an argument.

    Args:
        op: the function that an error names.
        prob_in: the argument of the user.

    Raises:
        ValueError: unless it is one of `ProbIn`.
    """
    require_choice(op, "prob_in", prob_in, get_args(ProbIn))
