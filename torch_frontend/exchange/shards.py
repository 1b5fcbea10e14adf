"""Weights over ranks: the local part that this rank multiplies, and the reduction of its gradient.

Shard(0)      experts    --to_local--> part     gradient: of the tokens of all ranks  -- / divisor --> DTensor
Replicate()   router     --to_local--> weight   gradient: of this rank's tokens -- all-reduce, / divisor --> DTensor
"""

from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...core_kernels.launch import fail
from ..ops.differentiable import differentiable
from ..ops.private import all_reduce, group_named
from .process_groups import naming_errors


class Ranks(NamedTuple):
    """The ranks that share a layer's experts.

    group_name, degree: their process group and its size. num_experts: of all ranks together; 0 is unknown. device_type:
    of their devices. gradient_divisor: divides a weight's gradient, which is a sum over the ranks.
    """

    group_name: str
    degree: int
    num_experts: int
    device_type: str
    gradient_divisor: int = 1


ALONE = Ranks("", 1, 0, "")
"""This process alone."""


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.divisor, None


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, divisor: int) -> Tensor:
        ctx.group_name, ctx.divisor = group_name, divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with naming_errors("ExpertParallel", "gradients", "an error while the ranks add them"):
            total = all_reduce(grads[0].contiguous(), group_named(ctx.group_name))
        return total / ctx.divisor, None, None


_divide_gradient = differentiable("ExpertParallel", _DivideGradient)
_reduce_gradient = differentiable("ExpertParallel", _ReduceGradient)


def sharded(parameter: Tensor, ranks: Ranks | None) -> Tensor:
    """This rank's part of a weight with `Shard(0)`, or the plain weight itself; differentiable."""
    part = cast(Tensor, parameter.to_local()) if isinstance(parameter, DTensor) else parameter
    return part if ranks is None or ranks.gradient_divisor == 1 else _divide_gradient(part, ranks.gradient_divisor)


def check_sharded(op: str, parameters: tuple[Tensor, ...], ranks: Ranks | None) -> None:
    """Raise TypeError for DTensors of a module that has no ranks: its forward would take a part for the whole."""
    if ranks is None:
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                _not_ours(op, parameter)


def check_group(op: str, ranks: Ranks, group: dist.ProcessGroup | None) -> None:
    """Raise RuntimeError if the process group has been destroyed since the layer was sharded. A default group made
    again has its old name; group: the old one, of a transport."""
    if ranks.degree == 1 or torch.compiler.is_compiling():
        return
    try:
        dist.get_process_group_ranks(group_named(ranks.group_name) if group is None else group)
    except (KeyError, RuntimeError, ValueError):
        hint = "build and shard the layer after init_process_group"
        fail(RuntimeError, op, "group", f"{ranks.group_name!r}, which has been destroyed", hint=hint)


def _not_ours(op: str, parameter: DTensor) -> NoReturn:
    got = f"a DTensor {tuple(parameter.shape)} with {parameter.placements} of another style"
    allowed = "allowed: plain tensors, or parallelize_module(moe, mesh, ExpertParallel()), or shard_moe(model, mesh)"
    fail(TypeError, op, "parameters", got, allowed)


def replicated(parameter: Tensor, ranks: Ranks | None) -> Tensor:
    """A weight with `Replicate()`, whose gradient is reduced over the ranks, or the plain weight itself;
    differentiable."""
    if not isinstance(parameter, DTensor):
        return parameter
    if ranks is None or not all(placement.is_replicate() for placement in parameter.placements):
        _not_ours("MoE", parameter)
    return _reduce_gradient(parameter.to_local(), ranks.group_name, ranks.gradient_divisor)
