"""As ep_device.py, of `expert_parallel_mm`: plain rows and TokenReplicas."""

from collections.abc import Callable
from typing import Any

import torch
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import PeerMemory, TokenReplicas, quantize_weights, sort_by_expert
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_mm
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from .ep_device import LOCAL, MOST_TOKENS, RECIPE, TOP_K, D, ran, routed
from .ep_overlap import device_of, leaves
from .ep_overlap import same as same_bytes

WIDE = 1024
"""The first of two products makes rows longer, the second one shorter."""
TINY = 1e-20


def results(
    memory: PeerMemory, over: PeerMemory | None, seed: int, most: int, *, replicas: bool = False, held: bool = False,
    again: bool = False, frozen: bool = False, tiny: bool = False, biased: bool = False, wide: int = WIDE,
    recipe: Recipe = RECIPE, dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor | None]:  # fmt: skip
    """y and all gradients of two products back to back. The weights of the second one live until the backward, so that
    the forward may save their operands. tiny: of one product, some rows of which are too small for fp32: +0 or -0."""
    group, device = memory.group, device_of(memory.group)
    x, experts = (t.to(device) for t in routed(seed, group.rank(), group.size(), most))
    order, inverse, counts = sort_by_expert(experts, LOCAL * group.size())
    x = x if replicas else x[order // TOP_K]
    dy = torch.randn(len(x), wide if tiny else D, generator=torch.Generator().manual_seed(seed + group.rank()))
    dy = dy.bfloat16().to(device)
    ws = [w.detach().mul(0.1).bfloat16() for w in leaves(seed, group, (LOCAL, wide, D), (LOCAL, D, wide))]
    if tiny:
        for t in (x[::2], dy[::2], ws[0][0]):
            t *= TINY
    leaf = x.to(dtype, copy=True).requires_grad_()
    ws = [w.clone().requires_grad_(not frozen) for w in ws]
    with torch.no_grad():
        ws[1].mul_(1)
    options: dict[str, Any] = {"recipe": recipe, "group": group, "transport": over}

    def product(x: Tensor, i: int) -> Tensor:
        w = quantize_weights(ws[i], recipe) if held else ws[i]
        rows = TokenReplicas(x, order, inverse, TOP_K) if replicas else x
        bias = torch.ones(w.shape[:2], device=device) if biased else None
        return expert_parallel_mm(rows, w, counts, bias=bias, **options)

    h = checkpoint(product, leaf, 0, use_reentrant=False) if again else product(leaf, 0)
    with torch.no_grad():
        unused = product(leaf, 0)  # between a forward and its backward
    y = h if tiny else product(h.to(dtype), 1)
    y.backward(dy)
    return [y, unused, leaf.grad, *(w.grad for w in ws)]


def same(memory: PeerMemory, *seeds: int, most: int = MOST_TOKENS, driven: int = 3, **options: Any) -> None:
    """driven: products of which the device drives the exchange."""
    for seed in seeds:
        before = len(ran)
        found = results(memory, memory, seed, most, **options)
        assert len(ran) - before == driven, (seed, options)
        same_bytes(results(memory, None, seed, most, **options), found, (seed, options))
    memory.overflow()


def negative_zeros(memory: PeerMemory) -> None:
    """A row that is no sum is copied, forward and backward; a sum of zeros is +0."""
    for replicas in (False, True):
        same(memory, 0, tiny=True, replicas=replicas, driven=2)
        y, _, dx, *_ = results(memory, memory, 0, MOST_TOKENS, tiny=True, replicas=replicas)
        for t in (y, dx):
            assert t is not None
            assert bool(((t == 0) & t.signbit()).any()) == (not replicas)


def others(memory: PeerMemory) -> None:
    """Products whose exchange the device does not drive, over the same memory as one that it does."""
    same(memory, 5, frozen=True, driven=1)
    mx = ("dispatch", "combine", "combine_grad")
    cases: list[dict[str, Any]] = [
        {"biased": True},
        {"dtype": torch.float32},
        {"wide": 544},
        {"recipe": Recipe.parse("mxfp8", compute="exact")},
        {"recipe": Recipe.parse("mxfp8", compute="fold", mxfp8_all_to_all=mx)},
    ]
    for options in cases:
        same(memory, 5, driven=0, **options)


def overflow(small: PeerMemory) -> None:
    """A row without room is NaN, and no other."""
    seed, most = 3, 60  # all to one rank, whose groups have room for 32 rows and some
    want, found = (results(small, over, seed, most)[1] for over in (None, small))
    assert want is not None
    assert found is not None
    lost = found.isnan().any(1)
    assert torch.equal(lost, found.isnan().all(1))
    same_bytes([want[~lost]], [found[~lost]], "the other rows")
    try:
        small.overflow()
    except RuntimeError as error:
        assert "groups of" in str(error), error  # noqa: PT017 -- raised on all ranks
    else:
        raise AssertionError("overflow() found no rows beyond the capacity")


def top_k_differs(memory: PeerMemory) -> None:
    """The rank of an expert computes the token of a row from its own top_k."""
    group, device = memory.group, device_of(memory.group)
    top_k = 1 + group.rank()
    experts = torch.arange(top_k, dtype=torch.int32, device=device).repeat(2, 1)
    order, inverse, counts = sort_by_expert(experts, LOCAL * group.size())
    rows = TokenReplicas(torch.ones(2, D, dtype=torch.bfloat16, device=device), order, inverse, top_k)
    w = torch.ones(LOCAL, D, D, dtype=torch.bfloat16, device=device)
    try:
        expert_parallel_mm(rows, w, counts, recipe=RECIPE, group=group, transport=memory)
    except ValueError as error:
        assert "top_k" in str(error), error  # noqa: PT017 -- raised on all ranks
    else:
        raise AssertionError("no error")


def checks(
    world: Callable[[], DeviceMesh], opened: Callable[..., PeerMemory], mix: Callable[[], PeerMemory]
) -> dict[str, Callable[[], object]]:
    """mix: memory of calls that the device drives and of others."""

    def memory() -> PeerMemory:
        return opened(MOST_TOKENS * TOP_K * world().size())

    return {
        "products of rows": lambda: same(memory(), 0, 1, 2, 3, 4, 5, 7),
        "products of replicas": lambda: same(memory(), 0, 1, 2, 3, 4, 5, 7, replicas=True),
        "products, no room to spare": lambda: same(opened(None, on_overflow="nan"), 5),
        "products, negative zeros": lambda: negative_zeros(memory()),
        "products, cached weights": lambda: [same(memory(), 5, held=True, replicas=r) for r in (False, True)],
        "products, recomputed": lambda: same(memory(), 6, again=True, driven=4),
        "products, not driven": lambda: others(mix()),
        "products, overflow": lambda: overflow(opened(8, on_overflow="nan")),
        "products, top_k differs": lambda: top_k_differs(memory()),
    }
