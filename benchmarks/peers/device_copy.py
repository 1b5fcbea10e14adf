"""The roof of an op that moves bytes: a device copy of as many."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# Larger copies reuse the buffers piece by piece: two whole buffers do not fit next to the largest case.
COPY_NBYTES = {"cuda": 4 << 30, "cpu": 1 << 20}


@cache
def _copy_buffers(device: str) -> tuple[Tensor, Tensor]:
    source = torch.randint(1, 255, (COPY_NBYTES[device],), dtype=torch.uint8, device=device)
    return source, torch.empty_like(source)


def copy_of(nbytes: int, device: str) -> Callable[[], object]:
    """A device copy that reads nbytes / 2 and writes nbytes / 2."""
    half = nbytes // 2
    source, target = _copy_buffers(device)
    sizes = [min(len(source), half - at) for at in range(0, half, len(source))]

    def run() -> None:
        for size in sizes:
            target[:size].copy_(source[:size])

    return run
