"""Ranks of PeerMemory on a CPU whose exchange the device would drive: its programs by program_on_cpu.py, files as the
memory of the ranks, Gloo as the barrier; run by test_device_exchange.py."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from mxep.core_kernels.peer import schedule
from mxep.core_kernels.peer.schedule import Memory
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import PeerMemory, TokenReplicas, quantize_weights, sort_by_expert
from mxep.torch_frontend.overlap import device_exchange, peer_memory
from mxep.torch_frontend.overlap.expert_parallel import Transport, expert_parallel_ffn
from mxep.torch_frontend.overlap.symmetric import Shared
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import ep_overlap, peer_ranks
from .program_on_cpu import ProgramOnCPU

INTERPRETER = True
D, F, LOCAL, TOP_K = 512, 64, 5, 3
MOST_TOKENS = 14
RECIPE = Recipe.parse("mxfp8", compute="fold")
PER_DIRECTION = 2
"""Barriers."""


class Files(peer_ranks.Files):
    """The slots are poisoned before a rank says that peers may write them, the rows that peers read when all have.
    mixed: memory of calls that the device drives and of others, which is not poisoned."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mixed: list[PeerMemory] = []

    def interrupt(self, memory: PeerMemory) -> None:
        self.barriers[id(memory)] = -1

    def barrier(self, shared: Shared, timeout_ms: int) -> None:
        (memory,) = (m for m in self.opened if m.buffer is not None and m.buffer.shared is shared)
        number = self.barriers[id(memory)] = self.barriers.get(id(memory), -1) + 1
        if memory in self.mixed or not memory.programs:
            dist.barrier(shared.handle)
            return
        places: Memory = next(reversed(memory.programs))[3]
        if number % PER_DIRECTION == 0:
            memory.own[places.slots : places.end] = 255
        dist.barrier(shared.handle)
        if number % PER_DIRECTION == 1:
            memory.own[places.rows : places.slots] = 255


@cache
def files() -> Files:
    return Files(peer_ranks.files().folder)


def opened(rows: int | None = None) -> PeerMemory:
    return files().open(peer_ranks.world().get_group(), rows)


def memory_of(side: int) -> list[Tensor]:
    (memory,) = (m for m in files().opened if id(m) == side)
    assert memory.buffer is not None
    return memory.buffer.shared.of_rank


def poisoned(*shape: object, **options: object) -> Tensor:
    """In place of torch.empty, for all that a call allocates."""
    out = EMPTY(*shape, **options)  # type: ignore[arg-type]
    out.view(torch.uint8).fill_(255)
    return out


EMPTY = torch.empty


def routed(seed: int, rank: int, ranks: int, most: int) -> tuple[Tensor, Tensor]:
    """As `ep_overlap.routing`, of TOP_K distinct experts."""
    e = LOCAL * ranks
    shared, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(100 * seed + rank)
    tokens = int(torch.randint(1, most, (1,), generator=own))
    tokens = 0 if seed == 2 or (seed == 1 and rank % 2) else tokens
    favour = torch.rand(e, generator=shared) ** 3 + 1e-3
    if seed == 0:  # all to the first experts
        favour = torch.where(torch.arange(e) < TOP_K, 1.0, 0.0)
    elif seed == 3:  # all to one rank
        favour = torch.where(torch.arange(e) // LOCAL == ranks - 1, 1.0, 0.0)
    elif seed == 4:  # empty experts
        favour = torch.where(torch.arange(e) % LOCAL == 1, 0.0, 1.0)
    experts = torch.multinomial(favour.expand(max(tokens, 1), e), TOP_K, generator=own)[:tokens]
    x = torch.randn(tokens, D, generator=own)
    if seed == 7:
        x[0] = torch.nan
    return x.bfloat16(), experts.to(torch.int32)


def results(
    over: Transport | None, seed: int, most: int, *, held: bool = False, plain: bool = False, again: bool = False,
    frozen: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """y and all gradients of two layers in a row, the second one without probabilities if `plain`."""
    group = peer_ranks.world().get_group()
    rank, ranks = group.rank(), group.size()
    x, experts = routed(seed, rank, ranks, most)
    order, inverse, counts = sort_by_expert(experts, LOCAL * ranks)
    leaf = x.requires_grad_()
    (probs,) = ep_overlap.leaves(seed + 50, group, (x.shape[0], TOP_K))
    layers = []
    for i in range(2):
        ws = ep_overlap.leaves(seed + i, group, (LOCAL, F, D), (LOCAL, F, D), (LOCAL, D, F))
        layers.append([w.detach().mul(0.1).bfloat16().requires_grad_(not frozen) for w in ws])

    def layer(x: Tensor, i: int) -> Tensor:
        weights = [quantize_weights(w, RECIPE) for w in layers[i]] if held else layers[i]
        tokens, of = TokenReplicas(x, order, inverse, TOP_K), None if plain and i else probs
        return expert_parallel_ffn(tokens, counts, *weights, of, recipe=RECIPE, group=group, transport=over)

    h = checkpoint(layer, leaf, 0, use_reentrant=False) if again else layer(leaf, 0)
    with torch.no_grad():
        unused = layer(leaf, 0)  # between a forward and its backward
    y = layer(h, 1)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + rank)).bfloat16())
    return [y, unused, leaf.grad, probs.grad, *(w.grad for ws in layers for w in ws)]


ran: list[Transport] = []


def same(memory: PeerMemory, *seeds: int, most: int = MOST_TOKENS, driven: int = 3, **options: bool) -> None:
    """driven: layers of which the device drives the exchange."""
    for seed in seeds:
        before = len(ran)
        found = results(memory, seed, most, **options)
        assert len(ran) - before == driven, (seed, options)
        ep_overlap.same(results(None, seed, most, **options), found, (seed, options))
    memory.overflow()


@cache
def memory() -> PeerMemory:
    return opened(MOST_TOKENS * TOP_K * dist.get_world_size())


def mixed() -> None:
    """The layers with gradients are not driven by the device, the one without is, over the same memory."""
    memory = opened()
    files().mixed.append(memory)
    same(memory, 5, 6, frozen=True, driven=1)


def overflow() -> None:
    """A rank gets more rows than it has room for: the tokens that lose one are NaN, and nobody else."""
    small = opened(8)
    seed, most = 3, 60  # all to one rank, whose groups have room for 32 rows and some
    want, found = results(None, seed, most), results(small, seed, most)
    y, there = found[1], want[1]
    assert y is not None
    assert there is not None
    lost = y.isnan().any(1)
    assert torch.equal(lost, y.isnan().all(1))
    assert lost.any()
    ep_overlap.same([there[~lost]], [y[~lost]], "the other tokens")
    try:
        small.overflow()
    except RuntimeError as error:
        assert "groups of" in str(error), error  # noqa: PT017 -- raised on all ranks
    else:
        raise AssertionError("overflow() found no rows beyond the capacity")


def more_rows_than_room() -> None:
    """A rank says so before it exchanges anything."""
    small = opened(1)
    x, experts = routed(5, 0, 1, 2)
    x, experts = (t.expand(1000, -1).contiguous() for t in (x[:1], experts[:1]))
    order, inverse, counts = sort_by_expert(experts, LOCAL * dist.get_world_size())
    group = peer_ranks.world().get_group()
    ws = ep_overlap.leaves(5, group, (LOCAL, F, D), (LOCAL, F, D), (LOCAL, D, F))
    tokens, ws = TokenReplicas(x, order, inverse, TOP_K), [w.detach().bfloat16() for w in ws]
    probs = torch.ones(len(x), TOP_K)
    try:
        expert_parallel_ffn(tokens, counts, *ws, probs, recipe=RECIPE, group=group, transport=small)
    except ValueError as error:
        assert "PeerMemory: rows: got 3000 rows of rank" in str(error), error  # noqa: PT017 -- on each rank
    else:
        raise AssertionError("no error")


def begin(rank: int) -> None:
    peer_ranks.begin(rank)
    peer_memory.shared_memory = files().shared_memory
    peer_memory.barrier = files().barrier
    device_exchange.runs_on = lambda device: True
    schedule.takes = lambda *sizes: True
    device_exchange.cpp_bindings = SimpleNamespace(CudaProgram=lambda exchange, index, types, steps: ProgramOnCPU(
        steps, memory_of, rank), why_not_cuda=None)  # fmt: skip
    PeerMemory.side_stream = property(id)  # type: ignore[method-assign, assignment]
    device_exchange.torch = SimpleNamespace(**{**vars(torch), "empty": poisoned})
    real = device_exchange.run

    def counted(call, *arguments):
        ran.append(call.memory)
        return real(call, *arguments)

    from mxep.torch_frontend.overlap import expert_parallel

    expert_parallel.run_on_device = counted


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    return {
        "routings": lambda: same(memory(), 0, 1, 2, 3, 4, 5, 7),
        "no room to spare": lambda: same(opened(), 5),
        "cached weights": lambda: same(memory(), 5, held=True),
        "no probabilities": lambda: same(memory(), 6, plain=True),
        "recomputed": lambda: same(memory(), 6, again=True, driven=4),
        "frozen weights": mixed,
        "overflow": overflow,
        "more rows than room": more_rows_than_room,
    }
