"""A training on several ranks, whose weights, gradients and moments FSDP2 shards; every rank has tokens of its own.

layer              gathered before its forward and its backward; gradients reduced after each backward
embedding, norm    gathered until the backward
head               gathered for the sequences of a micro-batch; its gradient reduced after the last one
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


def ranks() -> int:
    """Of the default group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def shard(model: Any, head: nn.Module, device: str) -> None:
    """model: of transformers; head: a module around its head. Over all ranks of the default group."""
    mesh = init_device_mesh(device, (ranks(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model, mesh=mesh, reshard_after_forward=False)
    fully_shard(head, mesh=mesh, reshard_after_forward=False)


def end_head(head: Any, last: bool) -> None:
    """What follows the backward of a sequence of a micro-batch, the last one or not."""
    head.set_requires_gradient_sync(last)
    head.set_reshard_after_backward(last)


def values_of(parameter: Tensor) -> Tensor:
    """A tensor for all values of a parameter; of a sharded one it is new, and `keep` copies this rank's part back."""
    if not isinstance(parameter, DTensor):
        return parameter
    return torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def keep(parameter: Tensor, values: Tensor) -> None:
    """Copy this rank's part of the values, unless they are the parameter."""
    if isinstance(parameter, DTensor):
        assert parameter.placements == (Shard(0),)
        local = parameter.to_local()
        if local.numel():
            local.copy_(values.chunk(ranks())[rank()])


def mean(loss: Tensor) -> Tensor:
    """Of all ranks."""
    dist.all_reduce(loss)
    return loss / ranks()


def total(number: float, device: str) -> float:
    """Of all ranks."""
    if ranks() == 1:
        return number
    found = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(found)
    return float(found)


def extreme(number: int, device: str, op: Any) -> int:
    """The least or the largest of all ranks. op: dist.ReduceOp.MIN or MAX."""
    if ranks() == 1:
        return number
    found = torch.tensor(number, device=device)
    dist.all_reduce(found, op=op)
    return int(found)
