"""torchao's names within torch.compile(fullgraph=True): each alone, and in one pipeline, are eager in every bit."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from mxep.torch_frontend.integrations.torchao import (
    _to_mxfp8_then_scaled_grouped_mm,
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
    unpermute_hp_fwd_mxfp8_bwd,
)
from torch import Tensor

K, N, EXPERTS = 64, 96, 2
TABLES = {1: [[[24, 9]]], 2: [[[7, 0], [5, 12]], [[3, 9], [1, 4]]]}
"""By number of ranks: table[sender][receiver][expert of the receiver], rows."""


def compiled_names(group: dist.ProcessGroup | None) -> None:
    """group: of one or two ranks, None for a process alone."""
    degree, me = (group.size(), group.rank()) if group else (1, 0)
    table = TABLES[degree]
    sent = [sum(counts) for counts in table[me]]
    received = [sum(row[me]) for row in table]
    counts = torch.tensor([row[me] for row in table]).flatten()
    draw = torch.Generator().manual_seed(me)
    x, w, up = (torch.randn(*s, generator=draw).bfloat16() for s in ((sum(sent), K), (EXPERTS, N, K), (EXPERTS, K, N)))
    forth, back = (received, sent, group), (sent, received, group)

    def dispatch(x: Tensor) -> Tensor:
        return a2a_dispatch_mxfp8_fwd_hp_bwd(x, *forth)

    def permuted(rows: Tensor) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
        shape, groups, indices, _, ends = permute_mxfp8_fwd_hp_bwd(rows, counts, degree, EXPERTS)
        return shape, groups, indices, ends

    def unpermute(x: Tensor) -> Tensor:
        shape, groups, indices, _ = permuted(x)
        return unpermute_hp_fwd_mxfp8_bwd(groups, indices, shape)

    def pipeline(x: Tensor, w: Tensor, up: Tensor, wgrad_with_hp: bool) -> Tensor:
        shape, groups, indices, ends = permuted(dispatch(x))
        h = _to_mxfp8_then_scaled_grouped_mm(groups, w.mT, ends, wgrad_with_hp=wgrad_with_hp)
        out = _to_mxfp8_then_scaled_grouped_mm(h.float().sigmoid().bfloat16(), up.mT, ends, wgrad_with_hp=wgrad_with_hp)
        return a2a_combine_hp_fwd_mxfp8_bwd(unpermute_hp_fwd_mxfp8_bwd(out, indices, shape), *back)

    rows = torch.randn(sum(received), K, generator=draw).bfloat16()
    equal_to_eager(lambda x: to_mxfp8_a2a_dequant(x, *forth), x)
    equal_to_eager(lambda rows: a2a_combine_hp_fwd_mxfp8_bwd(rows, *back, mxfp8_bwd=False), rows)
    equal_to_eager(lambda *tensors: pipeline(*tensors, wgrad_with_hp=True), x, w, up)
    if degree == 1:  # the same without collectives
        equal_to_eager(lambda x: dispatch(x).dequantize(), x)
        equal_to_eager(unpermute, rows)
        equal_to_eager(lambda *tensors: pipeline(*tensors, wgrad_with_hp=False), x, w, up)


def equal_to_eager(function: Callable[..., Tensor], *arguments: Tensor) -> None:
    """In the result and in every gradient."""

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [a.clone().requires_grad_() for a in arguments]
        out = function(*leaves)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    torch._dynamo.reset()
    want, got = step(function), step(torch.compile(function, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, got, want))
