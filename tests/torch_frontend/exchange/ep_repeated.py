"""A token that has an expert twice, by its caller's choice: it counts twice, as two experts with the same weights."""

from itertools import product

import torch
from mxep.core_kernels.policy.deduplicate import CHOICES
from mxep.torch_frontend import ExpertParallel, MoE, RouterConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

D, E = 64, 8
TWICE = ((0, 0), (4, 4), (0, 4), (4, 0), (0, 3), (6, 7), (4, 2), (2, 6))
COPIED = ((0, 1), (4, 5), (0, 4), (4, 0), (0, 3), (6, 7), (4, 2), (2, 6))
"""Experts 1 and 5 have the weights of experts 0 and 4. With two ranks, experts of the same weights share a rank."""
APART = [e for e in range(E) if e not in (0, 1, 4, 5)]
OVER_RANKS = [(p, r) for p, r in product(("combine", "swiglu", "input"), CHOICES)
              if p != "input" or r is None]  # fmt: skip


def same_as_two_experts(mesh: DeviceMesh | None, prob_in, deduplicate, recipe: str) -> None:
    torch.manual_seed(0)
    moe = MoE(D, 96, E, RouterConfig(2, prob_in=prob_in), recipe=recipe, bias=True)
    with torch.no_grad():
        for w in moe.experts.parameters():
            w += torch.randn(w.shape) / 8  # biases too
            w[1], w[5] = w[0], w[4]
    if mesh is not None:
        parallelize_module(moe.experts, mesh, ExpertParallel(deduplicate=deduplicate, gradients="sum"))
    once, again = (step(moe, choice, mesh.get_local_rank() if mesh else 0) for choice in (TWICE, COPIED))
    assert torch.equal(once["counts"][APART], again["counts"][APART])
    assert once["counts"][[0, 4]].equal(again["counts"][[0, 4]] + again["counts"][[1, 5]])
    for name in ("y", "x", "weights"):
        assert torch.equal(once[name], again[name]), name
    for name, _ in moe.experts.named_parameters():
        assert torch.equal(once[name][APART], again[name][APART]), name
        # The sum over all rows of an expert, and two sums, added. Measured: 2.2e-4 of 81, where blocks have other rows.
        torch.testing.assert_close(once[name][[0, 4]], again[name][[0, 4]] + again[name][[1, 5]], rtol=1e-5, atol=1e-3)


def step(moe: MoE, choice: tuple[tuple[int, ...], ...], rank: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    experts = torch.tensor(choice).repeat(6, 1)
    x, weights = torch.randn(len(experts), D, generator=draw), torch.rand(experts.shape, generator=draw)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    moe.zero_grad()
    y, stats = moe(x, experts, weights)
    y.backward(torch.randn(y.shape, generator=draw))
    found = {"y": y.detach(), "x": leaves[0].grad, "weights": leaves[1].grad, "counts": stats.counts}
    for name, w in moe.experts.named_parameters():
        found[name] = w.grad.full_tensor() if isinstance(w.grad, DTensor) else w.grad
    return found
