"""Layers whose exchange the device drives have the bytes of layers without a transport; run by device_ranks.py and on
GPUs by tests/gpu/exchange/ranks.py."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import PeerMemory, TokenReplicas, quantize_weights, sort_by_expert
from mxep.torch_frontend.overlap import device_exchange, expert_parallel
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_ffn
from mxep.torch_frontend.products.forms.form import WeightOperands
from mxep.torch_frontend.products.gathered_weights import GatheredBytes, gathered_weights
from mxep.torch_frontend.products.weights import format_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from .ep_overlap import device_of, leaves
from .ep_overlap import same as same_bytes

D, LOCAL, TOP_K = 512, 5, 3
HIDDEN = {"cpu": 64, "cuda": 2048}
MOST_TOKENS = 14
RECIPE = Recipe.parse("mxfp8", compute="fold")


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


def as_bytes(w: Tensor, recipe: Recipe = RECIPE) -> Any:
    """What FSDP2 gathers of a weight."""
    of = GatheredBytes()
    of.operands = format_of(recipe, w.device).weights(w.detach())
    return gathered_weights(w.shape, w.dtype, w.device, of).requires_grad_(w.requires_grad)


def gather_for_backward(of: GatheredBytes) -> None:
    """The bytes along N in other memory, and no others."""
    old = of.operands
    of.operands = WeightOperands(None, old.along_n._make(part.clone() for part in old.along_n))
    for part in (*old.along_k, *old.along_n):
        part.fill_(255)


def results(
    memory: PeerMemory, over: PeerMemory | None, seed: int, most: int, *, held: bool = False, plain: bool = False,
    again: bool = False, frozen: bool = False, gathered: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """y and all gradients of two layers back to back, the second one without probabilities if `plain`."""
    group, device = memory.group, device_of(memory.group)
    rank, ranks, f = group.rank(), group.size(), HIDDEN[device.type]
    x, experts = (t.to(device) for t in routed(seed, rank, ranks, most))
    order, inverse, counts = sort_by_expert(experts, LOCAL * ranks)
    leaf = x.requires_grad_()
    (probs,) = leaves(seed + 50, group, (x.shape[0], TOP_K))
    layers = []
    for i in range(2):
        ws = leaves(seed + i, group, (LOCAL, f, D), (LOCAL, f, D), (LOCAL, D, f))
        layers.append([w.detach().mul(0.1).bfloat16().requires_grad_(not frozen) for w in ws])
    if gathered and over is not None:
        layers = [list(map(as_bytes, ws)) for ws in layers]

    def layer(x: Tensor, i: int) -> Tensor:
        weights = [quantize_weights(w, RECIPE) for w in layers[i]] if held else layers[i]
        tokens, of = TokenReplicas(x, order, inverse, TOP_K), None if plain and i else probs
        return expert_parallel_ffn(tokens, counts, *weights, of, recipe=RECIPE, group=group, transport=over)

    h = checkpoint(layer, leaf, 0, use_reentrant=False) if again else layer(leaf, 0)
    with torch.no_grad():
        unused = layer(leaf, 0)  # between a forward and its backward
    y = layer(h, 1)
    if gathered and over is not None:
        for w in (w for ws in layers for w in ws):
            gather_for_backward(w.gathered)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + rank)).bfloat16().to(device))
    return [y, unused, leaf.grad, probs.grad, *(w.grad for ws in layers for w in ws)]


ran: list[PeerMemory] = []


def same(memory: PeerMemory, *seeds: int, most: int = MOST_TOKENS, driven: int = 3, **options: bool) -> None:
    """driven: layers of which the device drives the exchange."""
    for seed in seeds:
        before = len(ran)
        found = results(memory, memory, seed, most, **options)
        assert len(ran) - before == driven, (seed, options)
        same_bytes(results(memory, None, seed, most, **options), found, (seed, options))
    memory.overflow()


def mixed(memory: PeerMemory) -> None:
    """The layers with gradients are not driven by the device, the one without is, over the same memory."""
    same(memory, 5, 6, frozen=True, driven=1)
    same(memory, 5, frozen=True, gathered=True, driven=1)


def overflow(small: PeerMemory) -> None:
    """A rank gets more rows than it has room for: the tokens that lose one are NaN, and nobody else."""
    seed, most = 3, 60  # all to one rank, whose groups have room for 32 rows and some
    want, found = results(small, None, seed, most), results(small, small, seed, most)
    y, there = found[1], want[1]
    assert y is not None
    assert there is not None
    lost = y.isnan().any(1)
    assert torch.equal(lost, y.isnan().all(1))
    assert lost.any()
    same_bytes([there[~lost]], [y[~lost]], "the other tokens")
    try:
        small.overflow()
    except RuntimeError as error:
        assert "groups of" in str(error), error  # noqa: PT017 -- raised on all ranks
    else:
        raise AssertionError("overflow() found no rows beyond the capacity")


def keeps_no_rows(memory: PeerMemory) -> None:
    """The graph of a result does not keep the rows, of which the backward needs no value."""
    group, device, f = memory.group, device_of(memory.group), HIDDEN[device_of(memory.group).type]
    x, experts = (t.to(device) for t in routed(5, group.rank(), group.size(), MOST_TOKENS))
    order, inverse, counts = sort_by_expert(experts, LOCAL * group.size())
    weights = [
        w.detach().bfloat16().requires_grad_() for w in leaves(5, group, (LOCAL, f, D), (LOCAL, f, D), (LOCAL, D, f))
    ]
    probs, before = torch.ones(len(x), TOP_K, device=device, requires_grad=True), len(ran)
    x = x.requires_grad_() * 1
    rows, options = weakref.ref(x), {"recipe": RECIPE, "group": group, "transport": memory}
    y = expert_parallel_ffn(TokenReplicas(x, order, inverse, TOP_K), counts, *weights, probs, **options)
    assert len(ran) == before + 1
    del x
    assert rows() is None
    y.sum().backward()


def more_rows_than_room(small: PeerMemory) -> None:
    """A rank says so before it exchanges anything."""
    group, device = small.group, device_of(small.group)
    f = HIDDEN[device.type]
    x, experts = routed(5, 0, 1, 2)
    x, experts = (t.expand(1000, -1).contiguous().to(device) for t in (x[:1], experts[:1]))
    order, inverse, counts = sort_by_expert(experts, LOCAL * group.size())
    ws = leaves(5, group, (LOCAL, f, D), (LOCAL, f, D), (LOCAL, D, f))
    tokens, ws = TokenReplicas(x, order, inverse, TOP_K), [w.detach().bfloat16() for w in ws]
    probs = torch.ones(len(x), TOP_K, device=device)
    try:
        expert_parallel_ffn(tokens, counts, *ws, probs, recipe=RECIPE, group=group, transport=small)
    except ValueError as error:
        assert "PeerMemory: rows: got 3000 rows of rank" in str(error), error  # noqa: PT017 -- on each rank
    else:
        raise AssertionError("no error")


def longer_counts(memory: PeerMemory) -> None:
    """Counts of more rows than a rank has find no slot of an earlier call: the bytes of right counts."""
    group, device = memory.group, device_of(memory.group)
    f, experts = HIDDEN[device.type], LOCAL * group.size()
    ws = leaves(5, group, (LOCAL, f, D), (LOCAL, f, D), (LOCAL, D, f))
    ws = [w.detach().mul(0.1).bfloat16() for w in ws]

    def layer(tokens: int, more: int) -> Tensor:
        x, chosen = (t[:tokens].to(device) for t in routed(6, 0, group.size(), 1000))
        order, inverse, counts = sort_by_expert(chosen, experts)
        counts[-1] += more
        rows, probs = TokenReplicas(x, order, inverse, TOP_K), torch.ones(tokens, TOP_K, device=device)
        return expert_parallel_ffn(rows, counts, *ws, probs, recipe=RECIPE, group=group, transport=memory)

    layer(12, 0)
    same_bytes([layer(5, 0)], [layer(5, 20)], "longer counts")


def count_runs() -> None:
    """`same` counts the layers that the device drives from now on."""
    real = device_exchange.run
    if expert_parallel.run_on_device is not real:
        return

    def counted(call, *arguments):
        ran.append(call.memory)
        return real(call, *arguments)

    expert_parallel.run_on_device = counted


def checks(
    world: Callable[[], DeviceMesh], opened: Callable[..., PeerMemory], mix: Callable[[], PeerMemory]
) -> dict[str, Callable[[], object]]:
    """mix: memory of calls that the device drives and of others."""

    def memory() -> PeerMemory:
        return opened(MOST_TOKENS * TOP_K * world().size())

    return {
        "routings": lambda: same(memory(), 0, 1, 2, 3, 4, 5, 7),
        "no room to spare": lambda: same(opened(None, on_overflow="nan"), 5),
        "cached weights": lambda: same(memory(), 5, held=True),
        "gathered bytes": lambda: same(memory(), 5, gathered=True),
        "no probabilities": lambda: same(memory(), 6, plain=True),
        "recomputed": lambda: same(memory(), 6, again=True, driven=4),
        "frozen weights": lambda: mixed(mix()),
        "overflow": lambda: overflow(opened(8, on_overflow="nan")),
        "keeps no rows": lambda: keeps_no_rows(memory()),
        "more rows than room": lambda: more_rows_than_room(opened(1, on_overflow="nan")),
        "longer counts": lambda: longer_counts(mix()),
    }
