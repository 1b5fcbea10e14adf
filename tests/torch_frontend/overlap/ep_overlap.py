"""Functions over PeerMemory have the bytes of dispatch, experts and combine; run by peer_ranks.py and, on GPUs, by
tests/gpu/exchange/ranks.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from mxep import torch_frontend
from mxep.core_kernels.policy.recipe import RECIPES, Recipe
from mxep.torch_frontend import (
    TokenReplicas,
    combine,
    dispatch,
    dispatch_probs,
    grouped_mm,
    grouped_swiglu_ffn,
    quantize_weights,
    sort_by_expert,
)
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_ffn, expert_parallel_mm
from mxep.torch_frontend.overlap.peer_memory import PeerMemory
from torch import Tensor

D, F, TOP_K, LOCAL = 64, 32, 2, 3
TRANSFERS = ("dispatch", "dispatch_grad", "combine", "combine_grad")
RUNS = RECIPES | {
    "mxfp8 folded": Recipe.parse("mxfp8", compute="fold"),
    "mxfp8 in all transfers": Recipe.parse("mxfp8", mxfp8_all_to_all=TRANSFERS),
    "bf16 in all transfers": Recipe.parse("mxfp8", mxfp8_all_to_all=()),
}
ROUTINGS, MOST_TOKENS = 10, 40


def routing(seed: int, rank: int, ranks: int, most: int = MOST_TOKENS) -> tuple[Tensor, Tensor]:
    """Tokens of this rank and their experts (T, TOP_K): of seed 0 all to two experts, 1 none on ranks of an odd number,
    2 none on any rank, 3 all to one rank's experts, 4 with empty experts; else random and uneven. The first token of
    seed 7 is NaN."""
    e = LOCAL * ranks
    shared, own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(100 * seed + rank)
    tokens = int(torch.randint(1, most, (1,), generator=own))
    tokens = 0 if seed == 2 or (seed == 1 and rank % 2) else tokens
    favour = torch.rand(e, generator=shared) ** 3 + 1e-3
    if seed == 0:
        favour = torch.where(torch.arange(e) < TOP_K, 1.0, 0.0)
    elif seed == 3:
        favour = torch.where(torch.arange(e) // LOCAL == ranks - 1, 1.0, 0.0)
    elif seed == 4:
        favour = torch.where(torch.arange(e) % LOCAL == 1, 0.0, 1.0)
    experts = torch.multinomial(favour.expand(max(tokens, 1), e), TOP_K, generator=own)[:tokens]
    x = torch.randn(tokens, D, generator=own)
    if seed == 7:
        x[0] = torch.nan
    return x, experts.to(torch.int32)


def leaves(seed: int, group: dist.ProcessGroup, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + 100 * seed + group.rank())
    values = [torch.randn(shape, generator=generator).to(device_of(group)) for shape in shapes]
    return [value.requires_grad_() for value in values]


def device_of(group: dist.ProcessGroup) -> torch.device:
    nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def same(one: list[Tensor | None], other: list[Tensor | None], what: object) -> None:
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert (a is None) == (b is None), (what, i)
        if a is not None and b is not None:
            assert a.dtype == b.dtype, (what, i)
            bytes_of = [t.detach().reshape(-1).view(torch.uint8) for t in (a, b)]
            assert a.shape == b.shape, (what, i)
            assert torch.equal(*bytes_of), (what, i)


@contextmanager
def addresses_of_a_gpu() -> Iterator[None]:
    """Ops refuse an address that is no multiple of 16 bytes, on a CPU too."""
    real = torch_frontend.ops.call.layouts

    def layouts(tensors):
        for value in tensors:
            assert value.data_ptr() % 16 == 0, (value.shape, value.dtype, value.storage_offset())
        return real(tensors)

    torch_frontend.ops.call.layouts = layouts
    try:
        yield
    finally:
        torch_frontend.ops.call.layouts = real


@addresses_of_a_gpu()
def ffn(
    transport: PeerMemory, run: str, seeds: range, bias: bool = False, held: bool = False, frozen: bool = False,
    most: int = MOST_TOKENS,
) -> None:  # fmt: skip
    recipe, group = RUNS[run], transport.group
    rank, ranks, device = group.rank(), group.size(), device_of(group)
    for seed in seeds:
        x, experts = (t.to(device) for t in routing(seed, rank, ranks, most))
        order, inverse, counts = sort_by_expert(experts, LOCAL * ranks)
        results = []
        for over in ("no overlap", transport, *([None] if seed == 0 else [])):  # None: the default, no overlap
            w1, w3, w2, b1, b3, b2 = leaves(
                seed, group, *[(LOCAL, F, D)] * 2, (LOCAL, D, F), *[(LOCAL, F)] * 2, (LOCAL, D)
            )
            for w in (w1, w3, w2):
                w.requires_grad_(not frozen)
            (probs,) = leaves(seed + 50, group, (x.shape[0], TOP_K))
            leaf = x.bfloat16().requires_grad_()
            tokens = TokenReplicas(leaf, order, inverse, TOP_K)
            biases = (b1, b3, b2) if bias else None
            weights = [quantize_weights(w, recipe) for w in (w1, w3, w2)] if held else [w1, w3, w2]
            if over != "no overlap":
                y = expert_parallel_ffn(
                    tokens,
                    counts,
                    *weights,
                    probs,
                    recipe=recipe,
                    group=group,
                    transport=over,
                    biases=biases,
                )
            else:
                groups, _, route = dispatch(tokens, counts, recipe=recipe, group=group)
                inside = dispatch_probs(probs, route)
                options = {"recipe": recipe, "pad_token_groups": False}
                out = grouped_swiglu_ffn(groups, *weights, route.group_ends, inside, biases=biases, **options)
                y = combine(out, route)
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + rank))
            y.backward(dy.bfloat16().to(device))
            results.append([y, leaf.grad, probs.grad, *(t.grad for t in (w1, w3, w2, b1, b3, b2))])
        for found in results[1:]:
            same(results[0], found, (run, seed))
        if seed == 7:
            y, dx, *_ = (t for t in results[1] if t is not None)
            assert y[0].isnan().all()
            assert not y[1:].isnan().any()
            assert not dx[1:].isnan().any()


@addresses_of_a_gpu()
def products(transport: PeerMemory, run: str, replicas: bool, seeds: range, most: int = MOST_TOKENS) -> None:
    recipe, group = RUNS[run], transport.group
    rank, ranks, device = group.rank(), group.size(), device_of(group)
    for seed in seeds:
        x, experts = (t.to(device) for t in routing(seed, rank, ranks, most))
        order, inverse, counts = sort_by_expert(experts, LOCAL * ranks)
        results = []
        for over in ("no overlap", transport, *([None] if seed == 0 else [])):
            w, bias = leaves(seed, group, (LOCAL, F, D), (LOCAL, F))
            leaf = (x if replicas else x[order // TOP_K]).bfloat16().requires_grad_()
            rows = TokenReplicas(leaf, order, inverse, TOP_K) if replicas else leaf
            if over != "no overlap":
                y = expert_parallel_mm(rows, w, counts, bias=bias, recipe=recipe, group=group, transport=over)
            else:
                groups, _, route = dispatch(rows, counts, recipe=recipe, group=group)
                out = grouped_mm(groups, w, route.group_ends, bias=bias, recipe=recipe, pad_token_groups=False)
                y = combine(out, route)
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + rank))
            y.backward(dy.bfloat16().to(device))
            results.append([y, leaf.grad, w.grad, bias.grad])
        for found in results[1:]:
            same(results[0], found, (run, replicas, seed))


CHECKS: dict[str, Callable[[PeerMemory], None]] = {
    "routings": lambda memory: ffn(memory, "mxfp8", range(ROUTINGS)),
    **{f"recipe {run}": partial(ffn, run=run, seeds=range(4, 6), bias=True) for run in RUNS},
    "frozen weights": lambda memory: ffn(memory, "mxfp8", range(5, 6), frozen=True),
    "cached weights": lambda memory: ffn(memory, "mxfp8", range(5, 6), held=True),
    "products of rows": lambda memory: products(memory, "mxfp8", False, range(6)),
    "products of rows, all transfers": lambda memory: products(memory, "mxfp8 in all transfers", False, range(4, 6)),
    "products of replicas": lambda memory: products(memory, "bf16", True, range(4, 6)),
    "folded products": lambda memory: products(memory, "mxfp8 folded", False, range(4, 6)),
}
