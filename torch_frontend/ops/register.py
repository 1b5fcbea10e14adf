"""Registers ops of `torch.ops.mxep`: one function for CPU and CUDA tensors, a fake rule, no gradient.

    call --> dispatcher --> autograd --.-- plain tensors ------------> run
                                       '-- modes, subclasses, fakes --> dispatcher --> run | fake | ...

`torch.library.custom_op` registers the same, and compares the storage of every output with every input's at every
call. Outputs here are fresh by construction, and on a GPU that comparison took longer than the rest of the call. The
diagram needs private names of torch; without them `register` is `custom_op`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ...core_kernels.launch import fail
from .private import dispatcher, in_forward_mode, transformed

_LIBRARY = torch.library.Library("mxep", "FRAGMENT")
_NO_GRADIENT = "ops have no gradient: use the differentiable functions of mxep.torch_frontend"

Op = Callable[..., Any]
"""An op of `torch.ops.mxep`, its default overload."""


def _register_with_dispatcher(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Op:
    assert dispatcher is not None
    plain_keysets, after_autograd, below_autograd, any_requires_grad, mark_not_compiled = dispatcher
    is_grad_enabled = torch.is_grad_enabled
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    overload = getattr(torch.ops.mxep, name).default

    class NoGradient(torch.autograd.Function):
        """The op's outputs; NotImplementedError where their gradient is needed."""

        @staticmethod
        def forward(ctx: Any, below: Any, *args: Any) -> Any:
            with below_autograd():
                return overload.redispatch(below, *args)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            fail(NotImplementedError, str(overload), "gradient", "a request for it", hint=_NO_GRADIENT)

    def autograd(keyset: Any, *args: Any) -> Any:
        if in_forward_mode() and any(map(_has_tangent, args)):
            fail(NotImplementedError, str(overload), "inputs", "tangents of forward mode", hint=_NO_GRADIENT)
        if is_grad_enabled() and any_requires_grad(*args):
            if transformed():
                fail(NotImplementedError, str(overload), "inputs", "tensors of torch.func.grad", hint=_NO_GRADIENT)
            return NoGradient.apply(keyset & after_autograd, *args)
        # Key sets are compared as integers: a DispatchKeySet takes much longer to list its keys.
        if keyset.raw_repr() in plain_keysets:
            return run(*args)
        with below_autograd():
            return overload.redispatch(keyset & after_autograd, *args)

    # After a graph break Dynamo would compile the code of these functions.
    mark_not_compiled(run)
    mark_not_compiled(autograd)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"mxep::{name}", fake, lib=_LIBRARY)
    return overload


def _register_custom_op(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Op:
    op = torch.library.custom_op(f"mxep::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    overload = getattr(torch.ops.mxep, name).default

    def no_gradient(ctx: Any, *grads: Any) -> Any:
        fail(NotImplementedError, str(overload), "gradient", "a request for it", hint=_NO_GRADIENT)

    op.register_autograd(no_gradient)
    return overload


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None


register: Callable[[str, str, Callable[..., Any], Callable[..., Any]], Op] = (
    _register_custom_op if dispatcher is None else _register_with_dispatcher
)
"""register(name, schema, run, fake): register `run` and its fake rule as `torch.ops.mxep.<name>`; both take their
arguments by position."""
