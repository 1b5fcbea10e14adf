"""Layers over PeerMemory have the bytes of layers without a transport, and an overflow is loud; run by peer_ranks.py
and on GPUs by tests/gpu/exchange/ranks.py."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mxep.core_kernels.peer import oracle
from mxep.core_kernels.policy.rounds import capacity_of
from mxep.torch_frontend import (
    ExpertParallel,
    GroupedExperts,
    MoE,
    PeerMemory,
    RouterConfig,
    TokenReplicas,
    expert_parallel_ffn,
    sort_by_expert,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from . import ep_skips
from .ep_overlap import LOCAL, TOP_K, D, F, device_of, leaves, routing, same

PROB_IN = ("swiglu", "input")


class Layers(nn.Module):
    """A layer for each place of the probabilities, of one transport; the first multiplies gate and up again, the second
    is recomputed."""

    def __init__(self, mesh: DeviceMesh, carrier: PeerMemory | None, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        options: dict[str, Any] = {"recipe": recipe, "device": mesh.device_type}

        def layer(prob_in: Any) -> MoE:
            router, recompute = RouterConfig(TOP_K, prob_in=prob_in), prob_in == "swiglu"
            return MoE(D, F, LOCAL * mesh.size(), router, recompute=recompute, **options)

        self.layers = nn.ModuleList(map(layer, PROB_IN))
        for layer in self.layers:
            parallelize_module(layer, mesh, ExpertParallel(gradients="sum", transport=carrier))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, first = self.layers[0](x)
        y, second = checkpoint(self.layers[1], y + x, use_reentrant=False)
        return y, first.counts + second.counts

    def step(self, x: Tensor, dy: Tensor) -> list[Tensor]:
        """y, the rows of each expert, the gradients of x and of the parameters."""
        y, counts = self(x)
        found = [y.detach(), counts, *torch.autograd.grad(y, (x, *self.parameters()), dy)]
        return [t.to_local() if isinstance(t, DTensor) else t for t in found]


def tokens(seed: int, mesh: DeviceMesh, uneven: int = 3) -> tuple[Tensor, Tensor]:
    """x and dy of this rank."""
    rank = mesh.get_local_rank()
    shape = 2, 7 + uneven * rank, D
    x, dy = torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + rank)).to(mesh.device_type)
    return x.requires_grad_(), dy


def layers(mesh: DeviceMesh, memory: PeerMemory, recipe: str = "mxfp8", steps: int = 2) -> None:
    """Two layers with one memory, steps and an evaluation before each."""
    ours, plain = (Layers(mesh, carrier, recipe) for carrier in (memory, None))
    for seed in range(steps):
        x, dy = tokens(seed, mesh)
        with torch.no_grad():
            same(list(ours(x)), list(plain(x)), "evaluation")
        same(list(ours.step(x, dy)), list(plain.step(x, dy)), seed)


def _sums(carrier: PeerMemory, seed: int, without: Tensor | None = None) -> list[Tensor | None]:
    """y and the gradients of x and probs of a feed-forward; the inputs depend on the seed alone. without (T, TOP_K):
    replicas whose weight is zero."""
    group = carrier.group
    x, experts = (t.to(device_of(group)) for t in routing(seed, group.rank(), group.size()))
    order, inverse, counts = sort_by_expert(experts, LOCAL * group.size())
    (probs,) = leaves(seed, group, (x.shape[0], TOP_K))
    if without is not None:
        probs = probs.detach().masked_fill(without.to(probs.device), 0).requires_grad_()
    weights = leaves(seed, group, (LOCAL, F, D), (LOCAL, F, D), (LOCAL, D, F))
    x.requires_grad_()
    replicas = TokenReplicas(x, order, inverse, TOP_K)
    y = expert_parallel_ffn(replicas, counts, *weights, probs, group=group, transport=carrier)
    y.sum().backward()
    return [y.detach(), x.grad, probs.grad]


def overflow(small: PeerMemory, enough: PeerMemory) -> None:
    """Tokens with a row without a position are NaN, and so are their gradients; the others have their bytes. With
    on_overflow="drop" such rows have no part in them, as with a weight of zero. The routing is the first with tokens of
    both kinds."""
    group, experts = small.group, LOCAL * small.group.size()
    assert small.rows is not None
    capacity = capacity_of(small.rows, LOCAL, 32)
    for seed in range(50):
        routings = [routing(seed, rank, group.size())[1] for rank in range(group.size())]
        table = torch.stack([torch.bincount(e.flatten(), minlength=experts) for e in routings]).numpy()
        laid_out = [oracle.lay_out(table, rank, e.numel(), capacity) for rank, e in enumerate(routings)]
        without = sum(int((positions < 0).sum()) for positions, *_ in laid_out)
        if 0 < without < table.sum() / 2:
            break
    else:
        raise AssertionError("no routing overflows")
    positions, *_, needed = laid_out[group.rank()]
    inverse = sort_by_expert(routings[group.rank()], experts).inverse
    lost_slots = torch.from_numpy(positions)[inverse.long()].view(-1, TOP_K) < 0
    lost = lost_slots.any(1)
    drops = small.on_overflow == "drop"
    got, want = _sums(small, seed), _sums(enough, seed, lost_slots if drops else None)
    if drops:
        assert want[2] is not None
        want[2].masked_fill_(lost_slots.to(want[2].device), 0)
        same(got, want, "dropped rows")
    for of, (one, other) in zip((lost, lost, lost_slots), zip(got, want, strict=True), strict=True):
        assert one is not None
        assert other is not None
        one, other = one.cpu(), other.cpu()
        assert drops or one[of].isnan().all()
        same([one[~of]], [other[~of]], "tokens with positions")
    enough.overflow()
    rank = int((needed > capacity).argmax())
    words = f"{needed[rank]} rows with padding on rank {rank}; allowed: {capacity}"
    with pytest.raises(RuntimeError, match=words):
        small.overflow()
    small.overflow()


def more_rows(memory: PeerMemory) -> None:
    """A rank may have more rows than any had in the first call. They have the bytes of no transport where they find a
    position; else their outputs are NaN, and `overflow` raises on all ranks."""
    assert memory.rows is None
    _sums(memory, 5)
    group = memory.group
    assert memory.most is not None
    experts, rank, device = LOCAL * group.size(), group.rank(), device_of(group)
    weights = [w.detach() for w in leaves(0, group, (LOCAL, F, D), (LOCAL, F, D), (LOCAL, D, F))]
    rows_of = [
        memory.most // group.size() + 160 * (r == 0) for r in range(group.size())
    ]  # the padding has capacity for 96
    more = rows_of[rank]
    x = torch.randn(more, D, generator=torch.Generator().manual_seed(rank)).to(device)
    counts = torch.full((experts,), more // experts, dtype=torch.int32, device=device)
    counts[0] += more % experts
    of: dict[str, Any] = {"group": group}
    found = [expert_parallel_ffn(x, counts, *weights, transport=carrier, **of) for carrier in (memory, None)]
    same([found[0]], [found[1]], "more rows")
    memory.overflow()
    all_to_one = torch.zeros_like(counts)
    all_to_one[0] = more
    y = expert_parallel_ffn(x, all_to_one, *weights, transport=memory, **of)
    capacity = capacity_of(memory.most, LOCAL, 32)
    lost = sum(rows_of) - capacity
    assert 0 < lost < memory.most // group.size()
    # A group begins with the rows of rank 0: rows of the last rank find no position.
    assert int(y.isnan().all(1).sum()) == lost * (rank == memory.ranks - 1)
    with pytest.raises(RuntimeError, match=f"on rank 0; allowed: {capacity}"):
        memory.overflow()


def factor(memory: PeerMemory, enough: PeerMemory) -> None:
    """The first call sets the rows of a rank, which later calls keep: `capacity_factor` times their mean."""
    got, want = _sums(memory, 3), _sums(enough, 3)
    assert memory.rows is None
    assert memory.capacity_factor is not None
    rows = torch.tensor(routing(3, memory.rank, memory.ranks)[1].numel(), device=device_of(memory.group))
    dist.all_reduce(rows, group=memory.group)
    assert memory.most == math.ceil(memory.capacity_factor * int(rows) / memory.ranks) < enough.most
    same(got, want, "factor")
    memory.overflow()
    most = memory.most
    _sums(memory, 4)
    assert memory.most == most


class OwnForward(GroupedExperts):
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args)


def refused(mesh: DeviceMesh, memory: PeerMemory) -> None:
    """Arguments that this memory does not take; a wrong one of one rank raises on all before they allocate."""
    group, device, experts = memory.group, device_of(memory.group), LOCAL * mesh.size()
    x, (probs,) = torch.ones(4, D, device=device), leaves(0, group, (4, 1))
    order, inverse, counts = sort_by_expert(torch.zeros(4, 1, dtype=torch.int32, device=device), experts)
    weights, tokens = leaves(0, group, (LOCAL, F, D), (LOCAL, F, D), (LOCAL, D, F)), TokenReplicas(x, order, inverse, 1)
    with pytest.raises(ValueError, match="prob_in='combine'; allowed: 'swiglu' or 'input' with PeerMemory"):
        expert_parallel_ffn(tokens, counts, *weights, probs, prob_in="combine", group=group, transport=memory)
    of_first = group.rank() == 0
    words = "dtype torch.float64" if of_first else "bad arguments on rank 0"
    wrong = probs.double() if of_first else probs
    with pytest.raises((TypeError, ValueError), match=words):
        expert_parallel_ffn(tokens, counts, *weights, wrong, group=group, transport=memory)
    moe = MoE(D, F, experts, RouterConfig(TOP_K, prob_in="combine"), device=device)
    with pytest.raises(ValueError, match="ExpertParallel: module: got prob_in='combine'"):
        parallelize_module(moe, mesh, ExpertParallel(transport=memory))
    style = ExpertParallel(transport=memory, gradients="sum")
    with pytest.raises(ValueError, match=r"transport: got .*; allowed: None for a Bilinear"):
        parallelize_module(nn.Bilinear(4, 4, 4, device=device), mesh, style)
    moe = MoE(D, F, experts, RouterConfig(TOP_K), device=device)
    with pytest.raises(ValueError, match="deduplicate: got 'dispatch'; allowed: None with a transport"):
        parallelize_module(moe, mesh, ExpertParallel(transport=memory, deduplicate="dispatch"))
    with pytest.raises(ValueError, match=rf"transport: got {'None' if of_first else 'PeerMemory'}.* on rank"):
        parallelize_module(moe, mesh, ExpertParallel(transport=memory if of_first else None))
    parallelize_module(moe, mesh, style)
    moe.experts.__class__ = OwnForward
    with pytest.raises(TypeError, match="MoE: experts: got a forward of their own; allowed: the forward of GroupedEx"):
        moe(x)


def checks(mesh: Callable[[], DeviceMesh], opened: Callable[..., PeerMemory]) -> dict[str, Callable[[], object]]:
    """opened: new memory of the mesh's group with these rows or options."""

    def large() -> PeerMemory:
        return opened(60 * TOP_K * mesh().size())

    return {
        "layers": lambda: layers(mesh(), large()),
        "layers of all rows": lambda: layers(mesh(), opened(None), "bf16", 1),
        "overflow": lambda: overflow(opened(10, on_overflow="nan"), large()),
        "dropped rows": lambda: overflow(opened(10, on_overflow="drop"), large()),
        "factor": lambda: factor(opened(None, capacity_factor=1.9, on_overflow="nan"), large()),
        "refused": lambda: [refused(mesh(), memory) for memory in (opened(None), large())],
        "more rows": lambda: more_rows(opened(None, on_overflow="nan")),
        **ep_skips.checks(mesh, large),
    }
