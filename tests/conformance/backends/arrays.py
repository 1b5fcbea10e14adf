"""numpy <-> torch, bit for bit. numpy knows no bf16 of its own and torch no ml_dtypes, so bf16 travels as int16."""

import ml_dtypes
import numpy as np
import torch

BF16 = np.dtype(ml_dtypes.bfloat16)


def to_torch(x: np.ndarray) -> torch.Tensor:
    x = np.array(x, order="C")  # a copy: cases are shared and torch dislikes read-only memory
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.detach().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(BF16)
    return (x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else x).numpy()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, byte: int) -> torch.Tensor:
    """A tensor whose every byte is `byte`, where torch.empty would leave what was there."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.full((size,), byte, dtype=torch.uint8).view(dtype).reshape(shape)
