"""numpy -> torch, bit for bit. numpy has no bf16 of its own and torch no ml_dtypes, so bf16 is passed as int16."""

import numpy as np
import torch

from ...compare import BF16


def to_torch(x: np.ndarray) -> torch.Tensor:
    x = np.array(x, order="C")  # a copy: cases are shared, and torch warns of read-only memory
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, byte: int) -> torch.Tensor:
    """A tensor whose every byte is `byte`."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.full((size,), byte, dtype=torch.uint8).view(dtype).reshape(shape)
