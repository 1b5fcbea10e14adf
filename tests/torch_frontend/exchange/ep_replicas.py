"""A token is sent once to each rank: "dispatch" has the bytes of None, "both" the oracle's; run by ep_ranks.py."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.deduplicate import CHOICES, Deduplicate
from mxep.torch_frontend import (
    MoE,
    MXTensor,
    TokenReplicas,
    combine,
    dispatch,
    dispatch_probs,
    sort_by_expert,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.compare import same_bytes
from tests.conformance.backends.arrays import to_torch
from tests.replicas import LOCAL, ROUTINGS, RUNS, TOP_K, Case, case, expected

from ..overlap.ep_overlap import device_of, same


class Multiply(torch.autograd.Function):
    """The experts of tests/replicas.py."""

    @staticmethod
    def forward(ctx: Any, groups: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return times(groups, factors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return times(grads[0], *ctx.saved_tensors), None


def times(rows: Tensor, factors: Tensor) -> Tensor:
    rows = rows.dequantize() if isinstance(rows, MXTensor) else rows
    return (rows.float() * factors[:, None]).bfloat16()


def values(x: Tensor) -> Tensor:
    return torch.cat([x.q, x.sf], 1) if isinstance(x, MXTensor) else x


def run(c: Case, name: str, weighted: bool, how: Deduplicate, group: dist.ProcessGroup) -> list[Tensor | None]:
    """The groups, the probabilities in them, y, dx and dprobs."""
    device = device_of(group)
    x, dy, experts, probs, factors = (to_torch(values).to(device) for values in c)
    x, probs = x.requires_grad_(), probs.requires_grad_(weighted)
    order, inverse, counts = sort_by_expert(experts, len(c.factors))
    tokens = TokenReplicas(x, order, inverse, TOP_K)
    groups, _, route = dispatch(tokens, counts, recipe=RUNS[name], group=group, deduplicate=how)
    ends, row = route.group_ends, torch.arange(groups.shape[0], device=device)
    local = torch.searchsorted(ends, row, right=True, out_int32=True).clamp_max(LOCAL - 1)
    out = Multiply.apply(groups, factors[group.rank() * LOCAL + local])
    y = combine(out, route, probs if weighted else None)
    y.backward(dy)
    return [values(groups), dispatch_probs(probs.detach(), route), y, x.grad, probs.grad]


def of_routings(names: tuple[str, ...], routings: tuple[str, ...], group: dist.ProcessGroup) -> None:
    for name in names:
        for routing in routings:
            for weighted in (False, True):
                c = case(routing, group.rank(), group.size())
                each, once, summed = (run(c, name, weighted, how, group) for how in CHOICES)
                same(each, once, (name, routing, weighted))
                same(each[:2], summed[:2], (name, routing, weighted))
                for got, want in zip(summed[2:], expected(c, RUNS[name], weighted), strict=True):
                    assert (got is None) == (want is None)
                    if got is not None:
                        same_bytes(got, want)


def of_a_subset(group: dist.ProcessGroup) -> None:
    """An order of its own within each expert, and slots without a row."""
    c, device = case("random", group.rank(), group.size(), tokens=9), device_of(group)
    order, _, counts = sort_by_expert(to_torch(c.experts).to(device), len(c.factors))
    kept = torch.cat([part.flip(0) for part in order.split(counts.tolist())])
    kept = torch.where(kept % 7 == 3, -1, kept)
    inverse = torch.full_like(order, -1)
    inverse[kept[kept >= 0]] = torch.arange(order.shape[0], dtype=torch.int32, device=device)[kept >= 0]
    results = []
    for how in CHOICES[:2]:
        x = to_torch(c.x).to(device).requires_grad_()
        tokens = TokenReplicas(x, kept, inverse, TOP_K)
        groups, _, route = dispatch(tokens, counts, group=group, deduplicate=how)
        y = combine(groups.dequantize(), route)
        y.backward(to_torch(c.dy).to(device))
        results.append([values(groups), y, x.grad])
    same(*results, "subset")


def layer(parallel: Callable[..., tuple[MoE, DeviceMesh]], ep: int, prob_in: str) -> None:
    """The layer in two steps: outputs, statistics and gradients of "dispatch" are equal to the results of None."""
    results = []
    for how in CHOICES[:2]:
        moe, mesh = parallel(ep, "mxfp8", prob_in=prob_in, deduplicate=how)
        rank, found = mesh.get_local_rank(), []
        batch = torch.randn(7 + 3 * rank, moe.router.in_features, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            x = batch.clone().requires_grad_()
            y, stats = moe(x)
            y.square().sum().backward()
            found += [y, stats.counts, stats.aux_loss, x.grad, *(p.grad for p in moe.parameters())]
        results.append([t.to_local() if isinstance(t, DTensor) else t for t in found])
    same(*results, (ep, prob_in))


CHECKS: dict[str, Callable[[dist.ProcessGroup], None]] = {
    "routings": lambda group: of_routings(("mxfp8",), ROUTINGS, group),
    "recipes": lambda group: of_routings(tuple(RUNS), ("twice", "random"), group),
    "subset": of_a_subset,
}
