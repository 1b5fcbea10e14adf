"""An error in the experts of all ranks over PeerMemory, caught by a script; run by peer_ranks.py and
tests/gpu/exchange/ranks.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mxep.torch_frontend import ExpertParallel, MoE, PeerMemory, RouterConfig
from mxep.torch_frontend.overlap.local_experts import FFNExperts
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

STEPS, WHERE = 3, ("forward", "backward")
D, F, E, TOP_K, TOKENS = 64, 64, 8, 2, 30


class Skipped(RuntimeError):
    """What a device raises that has no more memory."""


@contextmanager
def failing(where: str) -> Iterator[None]:
    """The experts of this rank raise in the forward or in the backward."""
    real = getattr(FFNExperts, where)

    def broken(self: FFNExperts, *args: Any, **options: Any) -> Any:
        raise Skipped(f"no memory in the {where}")

    setattr(FFNExperts, where, broken)
    try:
        yield
    finally:
        setattr(FFNExperts, where, real)


def layer(mesh: DeviceMesh, transport: PeerMemory | None) -> MoE:
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


def skips_a_batch(mesh: DeviceMesh, transport: PeerMemory, where: str) -> None:
    """All ranks fail alike; the steps before and after it have the bytes of no transport."""
    rank, ours, plain = mesh.get_local_rank(), layer(mesh, transport), layer(mesh, None)
    for seed in range(STEPS):
        if seed == 1:
            try:
                with failing(where):
                    step(ours, seed, rank)
            except Skipped:
                continue
            raise AssertionError(f"no error in the {where}")
        for got, want in zip(step(ours, seed, rank), step(plain, seed, rank), strict=True):
            assert torch.equal(got, want), (where, seed)


def checks(mesh: Callable[[], DeviceMesh], memory: Callable[[], PeerMemory]) -> dict[str, Callable[[], object]]:
    return {f"skips {where}": lambda where=where: skips_a_batch(mesh(), memory(), where) for where in WHERE}
