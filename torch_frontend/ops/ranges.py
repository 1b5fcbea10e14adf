"""Ranges of a profile, named as in docs/concepts/pipeline.md: mxep.route, mxep.dispatch, mxep.experts, mxep.combine.

torch.profiler shows them, and `torch.autograd.profiler.emit_nvtx()` hands them to Nsight Systems. The backward has the
names of the autograd functions.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from .private import profiling

P = ParamSpec("P")
R = TypeVar("R")


def named(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: calls of the function are a range while a profiler runs. Otherwise a call costs 0.3 us more."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or not profiling():
                return function(*args, **kwargs)
            with record_function(name):
                return function(*args, **kwargs)

        return run

    return decorate
