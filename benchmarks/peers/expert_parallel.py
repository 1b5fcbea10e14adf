"""The pipeline of expert parallelism in plain torch, with bf16 all-to-alls, as torchtitan writes it.

    rows --all-to-all--> rank-major rows --index_select--> groups --product--> groups --index_select, all-to-all--> rows

The product is torch's grouped_mm in bf16, or ours in a recipe. Counts are equal and known: nothing is padded, and the
host waits for nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        received = torch.empty_like(grads[0])
        dist.all_to_all_single(received, grads[0].contiguous())
        return received


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


def grouped_mm_bf16(rows: Tensor, experts: int) -> Product:
    """torch's grouped product of groups of equal size."""
    ends = torch.arange(1, experts + 1, device=rows.device, dtype=torch.int32) * (rows.shape[0] // experts)
    return lambda x, w: F.grouped_mm(x, w.transpose(-2, -1), offs=ends)


def pipeline(rows: Tensor, w: Tensor, product: Product) -> Callable[[], Tensor]:
    """rows (M, K) bf16, equally many for each expert of each rank; w (G, N, K) -> a function that returns (M, N)."""
    ranks, experts = dist.get_world_size(), w.shape[0]
    place = torch.arange(rows.shape[0], device=rows.device)
    there = place.view(ranks, experts, -1).transpose(0, 1).reshape(-1)
    back = torch.empty_like(there)
    back[there] = place

    def run() -> Tensor:
        groups = _Permute.apply(_AllToAll.apply(rows), there, back)
        return _AllToAll.apply(_Permute.apply(product(groups, w), back, there))

    return run
