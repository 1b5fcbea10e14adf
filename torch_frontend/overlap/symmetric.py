"""Memory that the GPUs of a host map, a barrier of their streams, and copies of many tensors in one kernel.

With ops/private.py the only file that names private parts of torch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.private import private


class Shared(NamedTuple):
    """Memory that the GPUs of a group map: of_rank[r], uint8, is on the GPU of rank r. handle: keeps the maps alive."""

    of_rank: list[Tensor]
    handle: Any


_symmetric = private("torch.distributed._symmetric_memory")
# No public way: without the name `CopyEngines` raises, and `Collectives` carry the same bytes.
has_shared_memory = _symmetric is not None
"""Whether `shared_memory` works on this torch."""


def shared_memory(nbytes: int, group: dist.ProcessGroup) -> Shared:
    """Allocate and map `nbytes` bytes on the GPU of every rank; uninitialized. A collective; the host waits."""
    mine = _symmetric.empty(nbytes, dtype=torch.uint8, device="cuda")
    handle = _symmetric.rendezvous(mine, group.group_name)
    of_rank = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(group.size())]
    of_rank[group.rank()] = mine
    return Shared(of_rank, handle)


def barrier(memory: Shared, timeout_ms: int) -> None:
    """A barrier of the group in the current stream: a kernel, which ends with an error after `timeout_ms`."""
    memory.handle.barrier(channel=0, timeout_ms=timeout_ms)


def _public_copy_each(destinations: list[Tensor], sources: list[Tensor]) -> None:
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)


def _public_zero_each(tensors: list[Tensor]) -> None:
    for x in tensors:
        x.zero_()


# One kernel for all, where the public way launches one per tensor; a copy of one tensor would be one by a copy engine,
# which within a GPU reaches a small part of the memory's bandwidth.
copy_each: Callable[[list[Tensor], list[Tensor]], Any] = private("torch:_foreach_copy_") or _public_copy_each
"""copy_each(destinations, sources): copy every source into its destination; not for empty lists."""
zero_each: Callable[[list[Tensor]], Any] = private("torch:_foreach_zero_") or _public_zero_each
"""zero_each(tensors): fill every tensor with zeros; not for an empty list."""
