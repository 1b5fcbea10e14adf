"""One of two ranks, or both, get an error in a transfer and catch it, as a script does that skips a batch; run by
test_ep_skips.py, over gloo, and of a transport by peer_ranks.py and tests/gpu/exchange/ranks.py."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from mxep.torch_frontend import Collectives, ExpertParallel, MoE, RouterConfig
from mxep.torch_frontend.overlap.local_experts import FFNExperts
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

RANKS, LIMIT, STEPS = 2, 5, 3
WHERE, WHO = ("forward", "backward"), ("all", "one")
D, F, E, TOP_K, TOKENS = 64, 64, 8, 2, 30


class Skipped(RuntimeError):
    """What a device raises that has no more memory."""


@contextmanager
def failing(where: str, chunk: int) -> Iterator[None]:
    """The experts of this rank raise at a chunk of the forward or of the backward."""
    real, calls = getattr(FFNExperts, where), iter(range(1000))

    def broken(self: FFNExperts, *args: Any, **options: Any) -> Any:
        if next(calls) == chunk:
            raise Skipped(f"no memory in the {where}")
        return real(self, *args, **options)

    setattr(FFNExperts, where, broken)
    try:
        yield
    finally:
        setattr(FFNExperts, where, real)


def layer(mesh: DeviceMesh, transport: Any) -> MoE:
    torch.manual_seed(0)
    moe = MoE(D, F, E, RouterConfig(TOP_K), device=mesh.device_type)
    return parallelize_module(moe, mesh, ExpertParallel(transport=transport))


def step(moe: MoE, seed: int, rank: int) -> list[Tensor]:
    """y and the gradient of x."""
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(10 * seed + rank))
    x = x.to(moe.router.weight.device).requires_grad_()
    y = moe(x)[0]
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def skips_a_batch(mesh: DeviceMesh, transport: Any, where: str, chunk: int) -> None:
    """All ranks fail alike; the steps before and after it have the bytes of no transport."""
    rank, ours, plain = mesh.get_local_rank(), layer(mesh, transport), layer(mesh, None)
    for seed in range(STEPS):
        if seed == 1:
            try:
                with failing(where, chunk):
                    step(ours, seed, rank)
            except Skipped:
                continue
            raise AssertionError(f"no error in the {where}")
        for got, want in zip(step(ours, seed, rank), step(plain, seed, rank), strict=True):
            assert torch.equal(got, want), (where, chunk, seed)


def of_a_transport(
    mesh: Callable[[], DeviceMesh], transport: Callable[[], Any], chunks: int
) -> dict[str, Callable[[], object]]:
    """chunks: of a call over this transport."""
    places = product(WHERE, sorted({0, chunks - 1}))
    return {f"skips {w} {c}": lambda w=w, c=c: skips_a_batch(mesh(), transport(), w, c) for w, c in places}


@cache
def world() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


@cache
def transport() -> Collectives:
    return Collectives(world().get_group(), chunk_bytes=1)


def run(where: str, who: str) -> list[tuple[float, str]]:
    """The seconds and the end of each step."""
    moe, rank, found = layer(world(), transport()), dist.get_rank(), []
    for seed in range(STEPS):
        start = time.monotonic()
        try:
            if seed == 1 and (who == "all" or rank == 0):
                with failing(where, 1):
                    step(moe, seed, rank)
            else:
                step(moe, seed, rank)
            end = "right"
        except RuntimeError as error:
            end = f"{type(error).__name__}: {error}"
        found.append((time.monotonic() - start, end))
    return found


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    assert ranks == RANKS
    steps = {f"{where}-{who}": partial(run, where, who) for where, who in product(WHERE, WHO)}
    return of_a_transport(world, transport, E // RANKS) | steps
