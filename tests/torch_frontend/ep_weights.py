"""Checks of ep_ranks.py: what is kept of weights that are spread over ranks."""

from collections.abc import Callable

import torch
from mxep.torch_frontend import MoE, keep_quantized_weights, ops, weights
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

D, HIDDEN, E, TOP_K, STEPS = 64, 96, 8, 2, 4


def trained(moe: MoE, keep: bool, each: Callable[[int], None] = lambda i: None) -> list[Tensor]:
    """The parameters after two steps of two microbatches."""
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.1)
    with keep_quantized_weights(keep):
        for i in range(STEPS):
            x = torch.randn(16, D, generator=torch.Generator().manual_seed(i))
            moe(x.requires_grad_())[0].square().sum().backward()
            each(i)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in moe.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def kept_of_sharded_experts(parallel_layer: Callable[..., tuple[MoE, object]]) -> None:
    """The local part of a DTensor is quantized once per step, both ways, from its first update on."""
    sizes: list[int] = []

    def count(i: int) -> None:
        sizes.append(sum(len(kept.operands) for kept in weights._kept.values()))

    moe, _ = parallel_layer(4, "mxfp8")
    kept = trained(moe, True, count)
    assert sizes == [0, 0, 6, 6], sizes  # w1, w2, w3, along K and along N
    calls: list[int] = []
    real = ops.quantize_col
    ops.quantize_col = lambda x, *rest: calls.append(x.dim()) or real(x, *rest)
    try:
        x = torch.randn(16, D)
        for _ in range(3):
            moe(x.requires_grad_())[0].sum().backward()
    finally:
        ops.quantize_col = real
    assert calls.count(3) == 3, calls
    assert equal(kept, trained(parallel_layer(4, "mxfp8")[0], False))


def nothing_kept_of_gathered_weights(ranks: int) -> None:
    """FSDP2 writes what it gathers behind the version counter's back."""

    def layer() -> MoE:
        torch.manual_seed(0)
        moe = MoE(D, HIDDEN, E, TOP_K, recipe="mxfp8")
        fully_shard(moe, mesh=init_device_mesh("cpu", (ranks,)))
        return moe

    def none(i: int) -> None:
        assert not weights._kept

    assert equal(trained(layer(), True, none), trained(layer(), False))
