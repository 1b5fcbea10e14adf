"""An op of `torch.ops.mxep`: one function for CPU and CUDA tensors, a fake rule, no gradient.

    call --> dispatcher --> autograd --.-- plain tensors ------------> run
                                       '-- modes, subclasses, fakes --> dispatcher --> run | fake | ...

`torch.library.custom_op` registers the same, and compares the storage of every output with every input's at every
call: outputs here are fresh by construction, and on a GPU that took longer than everything else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload
from torch.autograd import forward_ad

from ..core_kernels.launch import fail

_LIBRARY = torch.library.Library("mxep", "DEF")
_is_grad_enabled, _any_requires_grad = torch.is_grad_enabled, torch._C._any_requires_grad
_transformed = torch._C._are_functorch_transforms_active
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset
# Whole sets as integers, which Python compares in a fraction of the time that it takes to ask a set for its keys.
_PLAIN = {
    (torch._C.DispatchKeySet(kernel) | torch._C.DispatchKeySet(autograd)).raw_repr()
    for kernel, autograd in (
        (torch._C.DispatchKey.CPU, torch._C.DispatchKey.AutogradCPU),
        (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.AutogradCUDA),
    )
}


_NO_GRADIENT = "allowed: none, ops are bytes in, bytes out; the differentiable functions are in mxep.torch_frontend"


class _NoGradient(torch.autograd.Function):
    """The op's outputs; a NotImplementedError if anyone asks for their gradient."""

    @staticmethod
    def forward(ctx, overload: OpOverload, below: torch._C.DispatchKeySet, *args: Any):
        ctx.overload = overload
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(below, *args)

    @staticmethod
    def backward(ctx, *grads: Any):
        fail(NotImplementedError, str(ctx.overload), "gradient", "a request for it", _NO_GRADIENT)


def _has_tangent(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None


def _not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, with a mark on its code: where a graph breaks, torch.compile looks into what runs next, and
    nothing of an op is to be compiled. `torch.compiler.disable` wraps instead, half a microsecond a call."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def register(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    """Register `run` and its fake rule as `torch.ops.mxep.<name>`; both take their arguments by position."""
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    overload = getattr(torch.ops.mxep, name).default

    def autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        # The level's number is -1 outside of forward mode.
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            fail(NotImplementedError, str(overload), "inputs", "tangents of forward mode", _NO_GRADIENT)
        if _is_grad_enabled() and _any_requires_grad(*args):
            if _transformed():
                fail(NotImplementedError, str(overload), "inputs", "tensors of torch.func.grad", _NO_GRADIENT)
            return _NoGradient.apply(overload, keyset & _BELOW_AUTOGRAD, *args)
        if keyset.raw_repr() in _PLAIN:
            return run(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & _BELOW_AUTOGRAD, *args)

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, _not_compiled(run), key)
    _LIBRARY.impl(name, _not_compiled(autograd), "Autograd", with_keyset=True)
    torch.library.register_fake(f"mxep::{name}", fake, lib=_LIBRARY)
    return overload
