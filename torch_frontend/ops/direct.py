"""The ops of __init__.py for code below autograd: without the dispatcher where nothing but the op would run.

    call --.-- plain tensors, no gradient needed, no modes, no profiler --> run
           '-- anything else ---------------------------------------------> torch.ops.mxep.<name>

The dispatcher takes the host as long as the rest of a call.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core_kernels.launch import KernelOp
from ...core_kernels.registry import OPS
from .. import ops
from .call import RUN, with_ends
from .private import dispatcher, in_forward_mode, open_modes, profiling, transformed

PLAIN = {Tensor, nn.Parameter}


def _direct(op: KernelOp) -> Callable[..., Any]:
    overload = getattr(ops, op.name)
    if dispatcher is None or open_modes is None:
        return overload
    num_inputs, run, modes, optional = len(op.inputs), RUN[op.name], open_modes, op.optional_ends
    is_compiling, is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled

    def call(*args: Any) -> Any:
        if is_compiling() or modes() or profiling() or transformed():
            return overload(*args)
        args = with_ends(op, args) if optional else args
        tensors = args[:num_inputs]
        if not PLAIN.issuperset(map(type, tensors)) or tensors[0].is_meta:
            return overload(*args)
        if is_grad_enabled() and (in_forward_mode() or any(t.requires_grad for t in tensors)):
            return overload(*args)
        return run(*args)

    dispatcher.mark_not_compiled(call)
    return call


globals().update({name: _direct(op) for name, op in OPS.items()})
permute_q_sf = ops.permute_q_sf
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """An op of the registry."""
        raise AttributeError(name)
