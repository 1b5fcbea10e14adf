"""The pipeline of expert parallelism in plain torch, with bf16 all-to-alls, as torchtitan writes it.

    rows --all-to-all--> rank-major rows --index_select--> groups --product--> groups --index_select, all-to-all--> rows

The product is torch's grouped_mm in bf16, or ours in a recipe. Counts are known before: the host waits for nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


class _AllToAll(torch.autograd.Function):
    """Splits are rows per rank, received and sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.splits = sent, received
        return _exchanged(x, received, sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(grads[0].contiguous(), *ctx.splits), None, None


def _exchanged(x: Tensor, received: list[int], sent: list[int]) -> Tensor:
    out = x.new_empty((sum(received), x.shape[1]))
    dist.all_to_all_single(out, x, received, sent)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


permute: Callable[[Tensor, Tensor, Tensor], Tensor] = _Permute.apply
"""permute(x, there, back): rows in another order; the gradient is a gather too."""


def grouped_mm_bf16(ends: Tensor) -> Product:
    """torch's grouped product of groups with these ends, (G,) int32."""
    return lambda x, w: F.grouped_mm(x, w.transpose(-2, -1), offs=ends)


def by_expert(received: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """received: (ranks, local experts), the received rows, `rows` together, in this order. Two index tensors: from
    groups, one per expert, to received rows, and back."""
    experts = torch.arange(received.shape[1], device=received.device).repeat(received.shape[0])
    there = torch.argsort(experts.repeat_interleave(received.flatten(), output_size=rows), stable=True)
    back = torch.empty_like(there)
    back[there] = torch.arange(rows, device=received.device)
    return there, back


def pipeline(rows: Tensor, w: Tensor, table: Sequence[Sequence[int]], product: Product) -> Callable[[], Tensor]:
    """rows (M, K) bf16, sorted by expert; w (G, N, K); table: the rows of each rank for each expert -> a function that
    returns (M, N)."""
    rank, experts = dist.get_rank(), w.shape[0]
    owned = [[of[r * experts : (r + 1) * experts] for r in range(len(table))] for of in table]
    sent, received = list(map(sum, owned[rank])), [sum(of[rank]) for of in owned]
    arrived = torch.tensor([of[rank] for of in owned], device=rows.device)
    there, back = by_expert(arrived, sum(received))

    def run() -> Tensor:
        groups = permute(_AllToAll.apply(rows, received, sent), there, back)
        return _AllToAll.apply(permute(product(groups, w), back, there), sent, received)

    return run
