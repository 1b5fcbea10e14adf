"""Layers over PeerMemory whose rows need several rounds lose no row, and have the bytes of layers without a transport;
run by device_ranks.py and peer_ranks.py, and on GPUs by tests/gpu/exchange/ranks.py."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import Recipe
from mxep.core_kernels.policy.rounds import list_rounds
from mxep.torch_frontend import PeerMemory, TokenReplicas, quantize_weights, sort_by_expert
from mxep.torch_frontend.overlap import peer_memory, rounds
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_ffn, expert_parallel_mm
from mxep.torch_frontend.products.gathered_weights import GatheredWeights
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .ep_device import as_bytes, gather_for_backward
from .ep_overlap import device_of, leaves, same

TOP_K, ALIGNMENT = 2, 32
ROUTINGS = "balanced", "one_expert", "dirichlet"
ROWS = 16
"""The capacity of a rank, without the padding of its experts."""
SPLIT_SQNR = 45.0
"""dB of the weight gradients of an expert that is in several rounds, sums of bf16 values: 48.1 at least on a CPU."""


class Kind(NamedTuple):
    """What a layer is. tokens: of rank 0; rank r has 7 r more."""

    name: str
    dim: int
    hidden: dict[str, int]
    local: int
    tokens: int
    recipe: Recipe
    product: bool = False
    replicas: bool = True


FOLDED = Recipe.parse("mxfp8", compute="fold")
DRIVEN = Kind("ffn", 512, {"cpu": 64, "cuda": 2048}, 4, 60, FOLDED)
PRODUCT = Kind("product", 1024, {"cpu": 512, "cuda": 512}, 4, 60, FOLDED, product=True)
ROWS_OF_A_PRODUCT = PRODUCT._replace(name="product of rows", replicas=False)
DRIVEN_KINDS = DRIVEN, PRODUCT, ROWS_OF_A_PRODUCT
MX = ("dispatch", "dispatch_grad", "combine", "combine_grad")
OTHER_KINDS = (
    Kind("plain ffn", 64, {"cpu": 32, "cuda": 32}, 2, 40, Recipe.parse("mxfp8")),
    Kind("ffn in bf16", 64, {"cpu": 32, "cuda": 32}, 2, 40, Recipe.parse("bf16")),
    Kind("ffn in all transfers", 64, {"cpu": 32, "cuda": 32}, 2, 40, Recipe.parse("mxfp8", mxfp8_all_to_all=MX)),
    Kind("plain product", 64, {"cpu": 96, "cuda": 96}, 2, 40, Recipe.parse("mxfp8"), product=True, replicas=False),
)


def routed(routing: str, seed: int, rank: int, ranks: int, tokens: int, local: int) -> Tensor:
    """(T, TOP_K) distinct experts. one_expert: of every token the last of rank 0. one_rank: all of rank 0."""
    e, shared, own = local * ranks, np.random.default_rng(seed), np.random.default_rng([seed, rank])
    favour = np.ones(e) if routing != "dirichlet" else shared.dirichlet(np.full(e, 0.2)) + 1e-4
    scores = np.log(favour) + own.gumbel(size=(tokens, e))
    if routing == "one_expert":
        scores[:, local - 1] += 100
    elif routing == "one_rank":
        scores[:, :local] += 100
    return torch.from_numpy(np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32))


class Found(NamedTuple):
    """values: y, a result without gradients, gradients of x and probs. weights: their gradients, (local, ..) each."""

    values: list[Tensor | None]
    weights: list[Tensor]
    counts: Tensor


def results(
    kind: Kind, group: dist.ProcessGroup, over: PeerMemory | None, routing: str, seed: int, *, tokens: int = 0,
    held: bool = False, again: bool = False, gathered: bool = False,
) -> Found:  # fmt: skip
    """Of two layers back to back. tokens: 0 is the kind's. gathered: weights are bytes that FSDP2 gathers."""
    rank, ranks, device = group.rank(), group.size(), device_of(group)
    experts = routed(routing, seed, rank, ranks, (tokens or kind.tokens) + 7 * rank, kind.local).to(device)
    order, inverse, counts = sort_by_expert(experts, kind.local * ranks)
    local, d, f = kind.local, kind.dim, kind.hidden[device.type]
    x = torch.randn(len(experts), d, generator=torch.Generator().manual_seed(100 * seed + rank)).bfloat16().to(device)
    leaf = (x if kind.replicas else x[order // TOP_K]).detach().requires_grad_()
    (probs,) = leaves(seed + 50, group, (len(experts), TOP_K))
    shapes = [[(local, f, d)], [(local, d, f)]] if kind.product else 2 * [[(local, f, d), (local, f, d), (local, d, f)]]
    layers = [
        [w.detach().mul(0.1).bfloat16().requires_grad_() for w in leaves(seed + i, group, *of)]
        for i, of in enumerate(shapes)
    ]
    if gathered and over is not None:
        layers = [[as_bytes(w, kind.recipe) for w in ws] for ws in layers]
    options: dict[str, Any] = {"recipe": kind.recipe, "group": group, "transport": over}

    def layer(x: Tensor, i: int) -> Tensor:
        weights = [quantize_weights(w, kind.recipe) for w in layers[i]] if held else layers[i]
        rows = TokenReplicas(x, order, inverse, TOP_K) if kind.replicas else x
        if kind.product:
            return expert_parallel_mm(rows, weights[0], counts, **options)
        return expert_parallel_ffn(rows, counts, *weights, probs, **options)

    h = checkpoint(layer, leaf, 0, use_reentrant=False) if again else layer(leaf, 0)
    with torch.no_grad():
        unused = layer(leaf, 0)  # between a forward and its backward
    y = layer(h, 1)
    for w in (w for ws in layers for w in ws if isinstance(w, GatheredWeights)):
        gather_for_backward(w.gathered)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + rank)).bfloat16().to(device))
    grads = [w.grad for ws in layers for w in ws]
    return Found([y, unused, leaf.grad, probs.grad], [g for g in grads if g is not None], counts)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The rounds after the first one of each forward and backward."""
    found: list[int] = []
    real = rounds.list_rounds

    def counting(*arguments: Any) -> Any:
        listed = real(*arguments)
        found.append(len(listed) - 1)
        return listed

    rounds.list_rounds = counting
    try:
        yield found
    finally:
        rounds.list_rounds = real


def overlaps(memory: PeerMemory) -> bool:
    """Whether a program of this memory has a second stream."""
    return any(step.stream for prepared in memory.programs.values() for step in prepared.program.steps)


def same_as_without(
    kind: Kind, memory: PeerMemory, routing: str, seed: int = 0, least: int = 2, **options: Any
) -> None:
    """Outputs and gradients of rows and probs have the bytes of no transport, and so have the weight gradients of an
    expert that is in one round; a split expert's are close. least: rounds of a layer."""
    group = memory.group
    with counted() as later:
        found = results(kind, group, memory, routing, seed, **options)
    want = results(kind, group, None, routing, seed, **options)
    same(want.values, found.values, (kind.name, routing, "values"))
    memory.overflow()
    assert overlaps(memory) == (kind in DRIVEN_KINDS)
    table = [torch.zeros_like(found.counts) for _ in range(group.size())]
    dist.all_gather(table, found.counts, group=group)
    capacity, _ = memory.capacity(kind.local, ALIGNMENT)
    of_rounds = [r.counts for r in list_rounds(torch.stack(table).cpu().numpy(), capacity, ALIGNMENT)]
    assert later, "no call listed its rounds"
    assert set(later) == {len(of_rounds) - 1}, (later, len(of_rounds))
    assert len(of_rounds) >= least, (kind.name, routing, capacity)
    rows = [a - b for a, b in zip(of_rounds, [*of_rounds[1:], np.zeros_like(of_rounds[0])], strict=True)]
    in_rounds = np.sum([r.sum(0) > 0 for r in rows], 0)
    split = (in_rounds > 1)[group.rank() * kind.local :][: kind.local]
    assert routing != "one_expert" or in_rounds[kind.local - 1] > 1
    for i, (one, other) in enumerate(zip(want.weights, found.weights, strict=True)):
        for e in range(kind.local):
            if not split[e]:
                same([one[e]], [other[e]], (kind.name, routing, "weights", i, e, in_rounds))
            else:
                error = float((one[e].float() - other[e].float()).norm() / one[e].float().norm())
                assert error < 10 ** (-SPLIT_SQNR / 20), (kind.name, routing, i, e, error)


def growth(kind: Kind, memory: PeerMemory) -> None:
    """A call with more rows than the calls before makes the capacity larger, unless `rows` is stated, and also the
    memory for the rows of a rank."""
    same_as_without(kind, memory, "balanced", least=1, tokens=3)
    before = memory.capacity(kind.local, ALIGNMENT)
    same_as_without(kind, memory, "dirichlet", least=1, tokens=90)
    after = memory.capacity(kind.local, ALIGNMENT)
    assert (after[0] > before[0]) == (memory.rows is None)
    assert after[1] > before[1]


def growth_in_place(kind: Kind, memory: PeerMemory) -> None:
    """A layer of longer rows has made the memory large enough, so that more rows only change their places in it."""
    results(kind._replace(dim=8 * kind.dim), memory.group, memory, "balanced", 0, tokens=8)
    same_as_without(kind, memory, "balanced", least=1, tokens=8)
    for seed, tokens in enumerate((30, 45, 65, 90)):  # each time another rank may be late
        before, buffer = memory.capacity(kind.local, ALIGNMENT), memory.mapped.buffer
        same_as_without(kind, memory, "balanced", seed, least=1, tokens=tokens)
        assert memory.capacity(kind.local, ALIGNMENT) > before
        assert memory.mapped.buffer is buffer


def default(kind: Kind, memory: PeerMemory) -> None:
    """Without arguments the capacity is 1.25 times the mean of the first call."""
    same_as_without(kind, memory, "one_rank", tokens=60)
    ranks = memory.ranks
    mean = TOP_K * (60 + 7 * (ranks - 1) / 2)
    assert memory.most == math.ceil(1.25 * mean)


def in_a_graph(kind: Kind, memory: PeerMemory) -> None:
    """The error comes before any work of the call."""
    real, before = peer_memory.is_capturing, memory.mapped.buffer
    peer_memory.is_capturing = lambda: True
    try:
        with pytest.raises(
            RuntimeError, match=r"on_overflow='rounds' in a CUDA graph; state PeerMemory\(on_overflow='nan'\)"
        ):
            results(kind, memory.group, memory, "balanced", 0)
    finally:
        peer_memory.is_capturing = real
    assert memory.mapped.buffer is before
    assert not memory.mapped.compared


def fails_in_a_later_round(kind: Kind, memory: PeerMemory, backward: bool) -> None:
    """All ranks fail alike; the calls before and after have the bytes of no transport."""
    same_as_without(kind, memory, "one_expert")
    real, calls = rounds.list_rounds, []

    def failing(*arguments: Any) -> Any:
        calls.append(0)
        found = real(*arguments)
        if len(calls) == (4 if backward else 1):  # three forwards are before
            found[1] = found[1]._replace(counts=None)
        return found

    rounds.list_rounds = failing
    try:
        with pytest.raises(TypeError, match="NoneType"):
            results(kind, memory.group, memory, "one_expert", 1)
    finally:
        rounds.list_rounds = real
    same_as_without(kind, memory, "one_expert", 2)


def checks(
    driven: bool, opened: Callable[..., PeerMemory], kinds: tuple[Kind, ...] | None = None
) -> dict[str, Callable[[], object]]:
    """driven: of calls whose exchange the device drives."""
    first, *others = kinds = kinds or (DRIVEN_KINDS if driven else OTHER_KINDS)
    cases = [(first, routing) for routing in ROUTINGS] + [(kind, "one_expert") for kind in others]
    found: dict[str, Callable[[], object]] = {
        f"rounds, {kind.name}, {routing}": partial(_case, kind, opened, routing) for kind, routing in cases
    }
    found[f"rounds, {first.name}, recomputed"] = partial(_case, first, opened, "dirichlet", again=True)
    found[f"rounds, {first.name}, cached weights"] = partial(_case, first, opened, "dirichlet", held=True)
    found[f"rounds, {first.name}, gathered bytes"] = partial(_case, first, opened, "dirichlet", gathered=True)
    found[f"rounds, {first.name}, growth"] = lambda: [growth(first, opened(rows)) for rows in (None, *[ROWS] * driven)]
    found[f"rounds, {first.name}, growth in place"] = lambda: growth_in_place(first, opened(None))
    if driven:  # a split expert has other spans of 256 tokens
        found[f"rounds, {first.name}, spans"] = lambda: same_as_without(first, opened(100), "one_expert", tokens=150)
    found[f"rounds, {first.name}, in a graph"] = lambda: in_a_graph(first, opened(ROWS))
    for backward in (False, True)[: 1 + driven]:  # the others know their rounds in the backward
        name = f"rounds, {first.name}, an error in the {'backward' if backward else 'forward'}"
        found[name] = lambda b=backward: fails_in_a_later_round(first, opened(ROWS), b)
    found[f"rounds, {first.name}, default"] = lambda: default(first, opened(None))
    return found


def _case(kind: Kind, opened: Callable[..., PeerMemory], routing: str, **options: Any) -> None:
    same_as_without(kind, opened(ROWS), routing, **options)
