"""Checks of ep_ranks.py and of tests/gpu/exchange/ranks.py: a layer in a training script, as the README shows it,
against one process."""

import copy
import io

import torch
import torch.distributed as dist
from mxep.torch_frontend import ExpertParallel, MoE, RouterConfig, SharedExpert, shard_moe
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from ...layer_options import layer_options

D, HIDDEN, E, TOP_K, TOKENS = 64, 96, 8, 2, 48


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def trained(moe: MoE, x: Tensor, scale: float, aux: float) -> list[Tensor]:
    """The weights after four steps of SGD on the mean over x's tokens, times `scale`."""
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    for _ in range(4):
        y, stats = moe(x)
        (scale * ((y - x.flip(-1)).square().mean() + aux * stats.aux_loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(p) for p in moe.parameters()]


def ranks_train_as_one_process(mesh: DeviceMesh, recipe: str, gradients: str, prob_in: str) -> None:
    """Ranks that start from seeds of their own and take a part of the batch each. With the weights in SwiGLU experts
    have biases, which are sharded too."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    first = dist.get_global_rank(mesh.get_group(), 0)
    torch.manual_seed(first)
    device = mesh.device_type
    options = {"recipe": recipe, "prob_in": prob_in, "router_bias": True, "bias": prob_in == "swiglu"}
    # Blocks of 32 tokens of the shared expert's weight gradient are others when ranks share the tokens.
    options |= {"shared": SharedExpert(32, gate=True), "selection_bias": True} if recipe == "bf16" else {}
    alone = MoE(D, HIDDEN, E, **layer_options(TOP_K, **options)).to(device)
    torch.manual_seed(dist.get_rank())
    moe = MoE(D, HIDDEN, E, **layer_options(TOP_K, **options)).to(device)
    parallelize_module(moe, mesh, ExpertParallel(gradients=gradients))
    before = [p.detach().clone() for p in alone.parameters()]
    for p, other in zip(moe.parameters(), before, strict=True):
        assert torch.equal(whole(p), other)
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(first)).to(device)
    want = trained(alone, x, 1.0, 0.1)
    got = trained(moe, x.chunk(ranks)[rank], 1.0 if gradients == "mean" else 1 / ranks, 0.1)
    for one, other, start in zip(got, want, before, strict=True):
        assert not torch.equal(other, start)
        # Measured: at most 4.1e-5 of the largest change, in bf16; sums over tokens are ordered otherwise. An expert
        # gradient that is `ranks` times too large, or a router that is not reduced, is off by more than a tenth.
        torch.testing.assert_close(one, other, rtol=0, atol=4e-4 * (other - start).abs().max().item())


def one_norm_one_optimizer(mesh: DeviceMesh) -> None:
    """Router and experts in one `clip_grad_norm_` and one fused or foreach optimizer; the norm is one process's."""
    torch.manual_seed(0)
    alone = MoE(D, HIDDEN, E, RouterConfig(TOP_K)).to(mesh.device_type)
    moe = copy.deepcopy(alone)
    parallelize_module(moe, mesh, ExpertParallel())
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(1)).to(mesh.device_type)
    alone(x)[0].square().mean().backward()
    moe(x.chunk(mesh.size())[mesh.get_local_rank()])[0].square().mean().backward()
    want = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    got = nn.utils.clip_grad_norm_(moe.parameters(), 1e-3, foreach=True)
    torch.testing.assert_close(whole(got), want, rtol=1e-5, atol=0)
    for options in ({"fused": True}, {"foreach": True}):
        torch.optim.AdamW(moe.parameters(), **options).step()
    assert isinstance(moe.router.weight, DTensor)
    assert moe.router.weight.placements == (Replicate(),)
    ours = moe.router.weight.to_local().detach().clone()
    dist.broadcast(ours, dist.get_global_rank(mesh.get_group(), 0), group=mesh.get_group())
    assert torch.equal(ours, moe.router.weight.to_local())


def sharded_twice(recipe: str) -> None:
    """FSDP2 over one dim of the mesh, experts over the other: gradients of the mean of all ranks' losses."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    alone = MoE(D, HIDDEN, E, RouterConfig(TOP_K), recipe=recipe)
    moe = copy.deepcopy(alone)
    parallelize_module(moe.experts, mesh["ep"], ExpertParallel())
    fully_shard(moe.experts, mesh=mesh["dp"])
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(1))
    alone(x)[0].square().mean().backward()
    moe(x.chunk(dist.get_world_size())[dist.get_rank()])[0].square().mean().backward()
    for name, p in moe.experts.named_parameters():
        got, want = whole(p.grad), getattr(alone.experts, name).grad
        # Measured: 124 dB and more; sums over tokens are ordered otherwise. Twice the gradient is at 0 dB.
        assert sqnr_db(got, want) > 100, (name, sqnr_db(got, want))


def one_data_rank(mesh: DeviceMesh, offload: OffloadPolicy | None) -> None:
    """FSDP2 over a data dim of 1, (1, experts): experts multiply the weights that it gathers, in the precision of its
    policy, with a gradient of x and without one."""
    policy, device = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), mesh.device_type
    torch.manual_seed(0)
    home = device if offload is None else "cpu"
    layer = shard_moe(MoE(D, HIDDEN, E, RouterConfig(TOP_K)).to(home), mesh, mp_policy=policy, offload_policy=offload)
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=0.5), torch.randn(TOKENS, D).to(device)
    for step in range(2):
        found = [layer(x.clone().requires_grad_(needed))[0] for needed in (True, False)]
        alone = MoE(D, HIDDEN, E, RouterConfig(TOP_K), device=device)
        alone.load_state_dict({name: whole(w.detach().to(device)) for name, w in layer.named_parameters()})
        with torch.no_grad():
            want = alone.bfloat16()(x.bfloat16())[0]
        assert [torch.equal(y, want) for y in found] == [True, True], step
        found[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sqnr_db(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return (10 * torch.log10(want.square().sum() / (got - want).square().sum())).item()


def saved_moved_and_cast(mesh: DeviceMesh) -> None:
    """`torch.save` of the module, casts and copies after a forward."""
    torch.manual_seed(0)
    moe = MoE(D, HIDDEN, E, RouterConfig(TOP_K)).to(mesh.device_type)
    parallelize_module(moe, mesh, ExpertParallel())
    x = torch.randn(8, D, device=mesh.device_type)
    y = moe(x)[0]
    y.sum().backward()
    moe.zero_grad()
    file = io.BytesIO()
    torch.save(moe, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(x)[0], y)
    assert torch.equal(copy.deepcopy(moe)(x)[0], y)
    moe.to(torch.bfloat16).to(torch.float32)
    moe(x)[0].sum().backward()
