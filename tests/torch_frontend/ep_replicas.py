"""A token goes once to each rank: "once" has every byte of "each", "summed" those of the oracle; run by ep_ranks.py."""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ep_overlap import device_of, same
from mxep.core_kernels.recipe import Recipe
from mxep.core_kernels.replicas import Replicas
from mxep.torch_frontend import (
    MoE,
    MXTensor,
    TokenReplicas,
    combine,
    dispatch,
    dispatch_probs,
    grouped_swiglu_ffn,
    sort_by_expert,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.compare import same_bytes
from tests.conformance.backends.arrays import to_torch
from tests.replicas import LOCAL, ROUTINGS, RUNS, TOP_K, Case, case, expected

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
MARGIN_DB = 0.3
HOWS: tuple[Replicas, ...] = ("each", "once", "summed")


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


def run(c: Case, name: str, weighted: bool, how: Replicas, group: dist.ProcessGroup) -> list[Tensor | None]:
    """The groups, the probabilities in them, y, dx and dprobs."""
    device = device_of(group)
    x, dy, experts, probs, factors = (to_torch(values).to(device) for values in c)
    x, probs = x.requires_grad_(), probs.requires_grad_(weighted)
    order, inverse, counts = sort_by_expert(experts, len(c.factors))
    tokens = TokenReplicas(x, order, inverse, TOP_K)
    groups, _, route = dispatch(tokens, counts, recipe=RUNS[name], group=group, replicas=how)
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
                each, once, summed = (run(c, name, weighted, how, group) for how in HOWS)
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
    for how in HOWS[:2]:
        x = to_torch(c.x).to(device).requires_grad_()
        tokens = TokenReplicas(x, kept, inverse, TOP_K)
        groups, _, route = dispatch(tokens, counts, group=group, replicas=how)
        y = combine(groups.dequantize(), route)
        y.backward(to_torch(c.dy).to(device))
        results.append([values(groups), y, x.grad])
    same(*results, "subset")


def layer(parallel: Callable[..., tuple[MoE, DeviceMesh]], ep: int, prob_in: str) -> None:
    """The layer in two steps: outputs, statistics and gradients of "once" are those of "each"."""
    results = []
    for how in HOWS[:2]:
        moe, mesh = parallel(ep, "mxfp8", prob_in=prob_in, replicas=how)
        rank, found = mesh.get_local_rank(), []
        batch = torch.randn(7 + 3 * rank, moe.router.in_features, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):
            x = batch.clone().requires_grad_()
            y, stats = moe(x)
            y.square().sum().backward()
            found += [y, stats.counts, stats.aux_loss, x.grad, *(p.grad for p in moe.parameters())]
        results.append([t.to_local() if isinstance(t, DTensor) else t for t in found])
    same(*results, (ep, prob_in))


def errors(group: dist.ProcessGroup) -> None:
    """The table of docs/pipeline.md: "summed" against "each", of all ranks."""
    found = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| `(\w+)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(found) == 6
    for recipe, legs, prob_in, figures in found:
        name = {"default": recipe, "all legs": "mxfp8 on all legs"}.get(legs, legs)
        each, summed = (of_experts(RUNS[name], prob_in, how, group) for how in HOWS[::2])
        measured = [decibels(one, other, group) for one, other in zip(summed, each, strict=True)]
        for got, want in zip(measured, figures.split(" | "), strict=True):
            near = got == want if "same" in (got, want) else abs(float(got) - float(want)) <= MARGIN_DB
            assert near, (name, prob_in, measured)


def of_experts(recipe: Recipe, prob_in: str, how: Replicas, group: dist.ProcessGroup) -> list[Tensor]:
    """y and the gradients of x, w1, w2 and the probabilities, of 4 experts per rank and top-8."""
    tokens, dim, local, k, ranks = 96, 128, 4, 8, group.size()
    of_rank = torch.Generator().manual_seed(group.rank())
    experts = torch.stack([torch.randperm(local * ranks, generator=of_rank)[:k] for _ in range(tokens)]).int()
    x, dy = (torch.randn(tokens, dim, generator=of_rank).bfloat16() for _ in range(2))
    w1, w3, w2 = (torch.randn(local, dim, dim, generator=of_rank) * dim**-0.5 for _ in range(3))
    probs = torch.rand(tokens, k, generator=of_rank)
    leaves = [leaf.requires_grad_() for leaf in (x, w1, w3, w2, probs)]
    order, inverse, counts = sort_by_expert(experts, local * ranks)
    tokens_of = TokenReplicas(x, order, inverse, k)
    groups, _, route = dispatch(tokens_of, counts, recipe=recipe, group=group, replicas=how)
    inside = dispatch_probs(probs, route) if prob_in == "swiglu" else None
    options = {"recipe": recipe, "pad_token_groups": False}
    out = grouped_swiglu_ffn(groups, w1, w3, w2, route.group_ends, inside, **options)
    y = combine(out, route, probs if inside is None else None)
    dx, dw1, _, dw2, dprobs = torch.autograd.grad(y, leaves, dy)
    return [y, dx, dw1, dw2, dprobs]


def decibels(got: Tensor, want: Tensor, group: dist.ProcessGroup) -> str:
    energies = torch.stack([t.double().square().sum() for t in (want, got.double() - want.double())])
    dist.all_reduce(energies, group=group)
    signal, noise = energies.tolist()
    return f"{10 * math.log10(signal / noise):.1f}" if noise else "same"


CHECKS: dict[str, Callable[[dist.ProcessGroup], None]] = {
    "routings": lambda group: of_routings(("mxfp8",), ROUTINGS, group),
    "recipes": lambda group: of_routings(tuple(RUNS), ("twice", "random"), group),
    "subset": of_a_subset,
}
