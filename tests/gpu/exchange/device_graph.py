"""A CUDA graph of a feed-forward whose exchange the device drives: replays with new routings have the bytes of no
transport, whichever rank is late."""

from collections.abc import Callable
from typing import Any

import torch
from mxep.torch_frontend import PeerMemory, TokenReplicas, expert_parallel_ffn, sort_by_expert
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...torch_frontend.overlap.ep_device import HIDDEN, LOCAL, RECIPE, TOP_K, D
from ...torch_frontend.overlap.ep_overlap import leaves, same

TOKENS, COMPARED, UNCOMPARED = 300, 20, 49
"""Replays: after UNCOMPARED ones, 20 times, one is compared; 1000 together."""
CYCLES = 2_000_000


def routed(seed: int, rank: int, experts: int) -> tuple[Tensor, ...]:
    """order, inverse, counts of TOKENS tokens; every fourth seed sends all to the first or the last experts."""
    scores = torch.rand(TOKENS, experts, generator=torch.Generator().manual_seed(100 * seed + rank))
    if seed % 4 == 1:
        scores[:, :TOP_K] += 1
    elif seed % 4 == 2:
        scores[:, -TOP_K:] += 1
    return sort_by_expert(scores.topk(TOP_K).indices.int().cuda(), experts)


def replays(memory: PeerMemory) -> None:
    group, device = memory.group, memory.device
    rank, experts, f = group.rank(), LOCAL * group.size(), HIDDEN["cuda"]
    weights = [
        w.detach().bfloat16().requires_grad_() for w in leaves(0, group, (LOCAL, f, D), (LOCAL, f, D), (LOCAL, D, f))
    ]
    (probs,) = leaves(1, group, (TOKENS, TOP_K))
    (x, dy) = (t.detach().bfloat16() for t in leaves(2, group, (TOKENS, D), (TOKENS, D)))
    x.requires_grad_()
    inputs = (x, probs, *weights)
    maps = [t.clone() for t in routed(0, rank, experts)]

    def step(over: PeerMemory | None, order: Tensor, inverse: Tensor, counts: Tensor) -> list[Any]:
        rows = TokenReplicas(x, order, inverse, TOP_K)
        y = expert_parallel_ffn(rows, counts, *weights, probs, recipe=RECIPE, group=group, transport=over)
        return [y, *torch.autograd.grad(y, inputs, dy)]

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        step(memory, *maps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = step(memory, *maps)
    for seed in range(COMPARED):
        new = routed(seed, rank, experts)
        want = step(None, *new)
        for at, of in zip(maps, new, strict=True):
            at.copy_(of)
        if seed % group.size() == rank:
            torch.cuda._sleep(CYCLES)
        for _ in range(UNCOMPARED + 1):
            graph.replay()
        same(want, found, seed)
    memory.overflow()


def checks(
    world: Callable[[], DeviceMesh], opened: Callable[[int | None], PeerMemory]
) -> dict[str, Callable[[], object]]:
    return {"1000 replays": lambda: replays(opened(TOKENS * TOP_K * world().size()))}
