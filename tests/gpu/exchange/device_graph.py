"""A CUDA graph of a feed-forward, or of one product, whose exchange the device drives: replays with new routings have
the bytes of no transport, whichever rank is late."""

from collections.abc import Callable
from typing import Any

import torch
from mxep.torch_frontend import PeerMemory, TokenReplicas, expert_parallel_ffn, sort_by_expert
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_mm
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...torch_frontend.overlap.ep_device import HIDDEN, LOCAL, RECIPE, TOP_K, D, ran
from ...torch_frontend.overlap.ep_device_mm import WIDE
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


Forward = Callable[[PeerMemory | None, Tensor, Tensor, Tensor], Tensor]
"""Of a transport, order, inverse, counts."""


def bf16_leaves(seed: int, memory: PeerMemory, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [t.detach().bfloat16().requires_grad_() for t in leaves(seed, memory.group, *shapes)]


def ffn(memory: PeerMemory) -> tuple[Forward, list[Tensor]]:
    """A function, and the inputs that get gradients."""
    f, options = HIDDEN["cuda"], {"recipe": RECIPE, "group": memory.group}
    weights = bf16_leaves(0, memory, (LOCAL, f, D), (LOCAL, f, D), (LOCAL, D, f))
    (probs,), (x,) = leaves(1, memory.group, (TOKENS, TOP_K)), bf16_leaves(2, memory, (TOKENS, D))

    def forward(over: PeerMemory | None, order: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
        rows = TokenReplicas(x, order, inverse, TOP_K)
        return expert_parallel_ffn(rows, counts, *weights, probs, **options, transport=over)

    return forward, [x, probs, *weights]


def product(memory: PeerMemory, replicas: bool) -> tuple[Forward, list[Tensor]]:
    options = {"recipe": RECIPE, "group": memory.group}
    w, x = bf16_leaves(0, memory, (LOCAL, WIDE, D), (TOKENS if replicas else TOKENS * TOP_K, D))

    def forward(over: PeerMemory | None, order: Tensor, inverse: Tensor, counts: Tensor) -> Tensor:
        rows = TokenReplicas(x, order, inverse, TOP_K) if replicas else x
        return expert_parallel_mm(rows, w, counts, **options, transport=over)

    return forward, [x, w]


def replays(memory: PeerMemory, forward: Forward, inputs: list[Tensor]) -> None:
    group, device = memory.group, memory.device
    rank, experts = group.rank(), LOCAL * group.size()
    maps = [t.clone() for t in routed(0, rank, experts)]
    (dy,) = (t.detach() for t in bf16_leaves(3, memory, tuple(forward(None, *maps).shape)))

    def step(over: PeerMemory | None, *routing: Tensor) -> list[Any]:
        y = forward(over, *routing)
        return [y, *torch.autograd.grad(y, inputs, dy)]

    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        step(memory, *maps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = len(ran)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = step(memory, *maps)
    assert len(ran) == before + 1
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


def checks(world: Callable[[], DeviceMesh], opened: Callable[..., PeerMemory]) -> dict[str, Callable[[], object]]:
    def memory() -> PeerMemory:
        return opened(TOKENS * TOP_K * world().size(), on_overflow="nan")

    return {
        "1000 replays": lambda: replays(of := memory(), *ffn(of)),
        "1000 replays of a product of rows": lambda: replays(of := memory(), *product(of, False)),
        "1000 replays of a product of replicas": lambda: replays(of := memory(), *product(of, True)),
    }
