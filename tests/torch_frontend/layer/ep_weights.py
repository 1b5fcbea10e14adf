"""Checks of ep_ranks.py: what is saved of weights that are spread over ranks, and that every write to them is seen."""

import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mxep.torch_frontend import MoE, RouterConfig
from mxep.torch_frontend.integrations.torchao import mxfp8_grouped_mm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

D, HIDDEN, E, TOP_K, STEPS = 64, 96, 8, 2, 4


def batch(seed: int) -> Tensor:
    return torch.randn(16, D, generator=torch.Generator().manual_seed(seed))


def saved_weights(moe: MoE) -> int:
    """Weights whose bytes a forward leaves for its backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        moe(batch(0).requires_grad_())
    return sum(t.dtype == torch.uint8 and t.dim() == 3 and t.shape[-1] in (D, HIDDEN) for t in saved)


def trained(moe: MoE) -> list[Tensor]:
    """The parameters after two steps of two microbatches."""
    optimizer = torch.optim.AdamW(moe.parameters(), lr=0.1)
    for i in range(STEPS):
        moe(batch(i).requires_grad_())[0].square().sum().backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in moe.parameters()]


def saved_of_sharded_experts(parallel_layer: Callable[..., tuple[MoE, object]]) -> None:
    """A forward leaves the transposed bytes of w1, w3 and w2, quantized in its own read."""
    moe, _ = parallel_layer(4, "mxfp8")
    trained(moe)  # a weight that was never written may be one that FSDP2 gathered
    assert saved_weights(moe) == 3


def nothing_saved_of_gathered_weights(ranks: int) -> None:
    """FSDP2 frees what it gathered after the forward: no byte of it stays."""

    def layer() -> MoE:
        torch.manual_seed(0)
        return MoE(D, HIDDEN, E, RouterConfig(TOP_K), recipe="mxfp8")

    def gathered() -> MoE:
        return fully_shard(layer(), mesh=init_device_mesh("cpu", (ranks,)))

    assert saved_weights(gathered()) == 0
    for one, other in zip(trained(gathered()), trained(layer()), strict=True):
        # All ranks have the same tokens; the mean of equal gradients is rounded once more.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def writes_to_the_local_part(parallel_layer: Callable[..., tuple[MoE, object]]) -> None:
    """In place `dcp.load` and `to_local().mul_()`, which a DTensor's version counter does not see; and a block that
    holds the weights does see the second."""
    moe, _ = parallel_layer(4)
    x = batch(1)
    saved = moe(x)[0].detach()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save({"model": moe.state_dict()}, checkpoint_id=folder[0])
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    moe(x)[0].sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(moe(x)[0], saved)
        dcp.load({"model": moe.state_dict()}, checkpoint_id=folder[0])
        assert torch.equal(moe(x)[0], saved)
        for p in moe.experts.parameters():
            p.to_local().mul_(2)
        doubled = moe(x)[0]
        assert not torch.equal(doubled, saved)
        with moe.cached_weights():
            assert torch.equal(moe(x)[0], doubled)
        with pytest.raises(RuntimeError, match="cached_weights: w1: got a write within"), moe.cached_weights():
            moe.experts.w1.to_local().mul_(2)


def collectives_on_the_weight() -> None:
    """c10d's in-place collectives are not counted as writes."""
    torch.manual_seed(dist.get_rank())
    ends, x = torch.tensor([64], dtype=torch.int32), torch.ones(64, 64, dtype=torch.bfloat16)
    for collective in (lambda p: dist.broadcast(p, 0), dist.all_reduce):
        p = nn.init.normal_(nn.Parameter(torch.empty(1, 32, 64, dtype=torch.bfloat16)))
        with torch.no_grad():
            mxfp8_grouped_mm(x, p.mT, ends)
            collective(p)
            assert torch.equal(mxfp8_grouped_mm(x, p.mT, ends), mxfp8_grouped_mm(x, p.clone().mT, ends))
