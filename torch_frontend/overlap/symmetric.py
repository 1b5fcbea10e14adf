"""Memory that the GPUs of a host map, and a barrier of their streams.

With ops/private.py the only file that names private parts of torch.
"""

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
# No public way: without the name `PeerMemory` raises, and the all-to-all gives the same bytes.
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
