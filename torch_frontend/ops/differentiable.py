"""An autograd.Function as a differentiable function of this package.

    forward   --> snapshot of the settings --> Function.forward
    backward  --> create_graph? raise      --> settings of the forward --> Function.backward

PyTorch lets a Function without a second derivative return gradients that count as constants, so a gradient penalty
would silently be zero. Here every request for more than a first derivative raises.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from ...core_kernels.launch import fail
from . import settings
from .private import release_saved, transformed


def differentiable(op: str, function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, for eager and compiled code, with errors that name `op`.

    The function raises NotImplementedError within torch.func's transforms and in forward mode; its backward raises it
    for create_graph=True. The backward runs with the settings of the forward, in whatever thread autograd chooses.
    """
    forward, backward = function.forward, function.backward

    def noted_forward(ctx: Any, *args: Any) -> Any:
        ctx.settings = settings.snapshot()
        return forward(ctx, *args)

    def first_backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            remedy = "allowed: first derivatives: backward() and torch.autograd.grad() without create_graph"
            fail(NotImplementedError, op, "backward", "create_graph=True", remedy)
        if ctx.settings == settings.snapshot():
            return backward(ctx, *grads)
        with settings.restored(ctx.settings):
            return backward(ctx, *grads)

    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        fail(NotImplementedError, op, "inputs", "tangents of forward mode", _REVERSE_MODE)

    function.forward = staticmethod(noted_forward)  # type: ignore[method-assign]
    function.backward = staticmethod(first_backward)  # type: ignore[method-assign]
    function.jvp = staticmethod(jvp)  # type: ignore[method-assign]

    # Dynamo would trace `backward` with a gradient of the output's type, but a plain output may have an MXTensor
    # gradient. allow_in_graph leaves the call to AOTAutograd, which runs the real engine and handles it.
    @torch.compiler.allow_in_graph
    def apply(*args: Any) -> Any:
        if transformed():
            fail(NotImplementedError, op, "inputs", "tensors of a torch.func transform", _REVERSE_MODE)
        return function.apply(*args)

    return apply


def save(ctx: Any, values: tuple[Any, ...]) -> None:
    """`ctx.save_for_backward` for tensors and None in nested tuples."""
    leaves: list[Any] = []
    ctx.positions = _index_leaves(values, leaves)
    ctx.save_for_backward(*leaves)


def saved_by(ctx: Any) -> Any:
    """The nested tuples given to `save`, once in a backward. Unless the graph is retained, the context drops its
    references: a tensor lives until it is read for the last time."""
    saved = ctx.saved_tensors
    if not torch.compiler.is_compiling():
        release_saved(ctx)
    return _values(ctx.positions, saved)


# Functions of the module: one that calls itself from within `save` is a cycle, which keeps the tensors until the next
# garbage collection.
def _index_leaves(values: tuple[Any, ...], leaves: list[Any]) -> tuple[Any, ...]:
    """The nested tuples with the index of each leaf at its position; appends the leaves."""
    positions: list[Any] = []
    for value in values:
        if isinstance(value, tuple):
            positions.append(_index_leaves(value, leaves))
        else:
            positions.append(len(leaves))
            leaves.append(value)
    return _like(values, positions)


def _values(positions: tuple[Any, ...], leaves: Sequence[Any]) -> tuple[Any, ...]:
    return _like(positions, [_values(p, leaves) if isinstance(p, tuple) else leaves[p] for p in positions])


def _like(kind: tuple[Any, ...], values: Iterable[Any]) -> tuple[Any, ...]:
    """The values as a tuple or, like `kind`, as a NamedTuple."""
    return kind._make(values) if hasattr(kind, "_make") else tuple(values)  # type: ignore[attr-defined]


_REVERSE_MODE = "allowed: reverse mode: backward() and torch.autograd.grad(); no torch.func.grad, vmap, jvp"
