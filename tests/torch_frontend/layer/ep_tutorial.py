"""Experts and a parallel style as a user of torchao's tutorial writes them; ep_ranks.py runs the check."""

import torch
import torch.nn.functional as F
from mxep.torch_frontend import ExpertParallel
from mxep.torch_frontend.integrations.torchao import _to_mxfp8_then_scaled_grouped_mm as mxfp8_gmm
from mxep.torch_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

D, HIDDEN, E = 64, 96, 8


class Experts(nn.Module):
    """Experts as a user of the tutorial writes them, on mxep's functions."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("w1", (E, HIDDEN, D)), ("w2", (E, D, HIDDEN)), ("w3", (E, HIDDEN, D))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape).bfloat16() * shape[-1] ** -0.5))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        offsets = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)
        h = F.silu(mxfp8_gmm(x, w1.transpose(-2, -1), offs=offsets, wgrad_with_hp=True))
        h = h * mxfp8_gmm(x, w3.transpose(-2, -1), offs=offsets, wgrad_with_hp=True)
        return mxfp8_gmm(h, w2.transpose(-2, -1), offs=offsets, wgrad_with_hp=True).type_as(x)


class HandMadeStyle(ParallelStyle):
    """The tutorial's steps, argument by argument."""

    def _dispatch(self, module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        rows, counts = inputs
        ep = mesh.shape[0]
        with torch.no_grad():
            received = all_to_all_single(counts, None, None, group=mesh.get_group())
            received = torch.ops._c10d_functional.wait_tensor(received)
            self.input_splits = counts.view(ep, -1).sum(dim=1).tolist()
            self.output_splits = received.view(ep, -1).sum(dim=1).tolist()
        rows = a2a_dispatch_mxfp8_fwd_hp_bwd(
            rows,
            output_splits=self.output_splits,
            input_splits=self.input_splits,
            group_name=mesh.get_group().group_name,
        )
        self.shape, rows, self.indices, received, _ = permute_mxfp8_fwd_hp_bwd(
            rows, received, ep, counts.shape[0] // ep, use_triton_for_bwd=True
        )
        return rows, received

    def _combine(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        output = unpermute_hp_fwd_mxfp8_bwd(output, self.indices, self.shape)
        return a2a_combine_hp_fwd_mxfp8_bwd(
            output,
            output_splits=self.input_splits,
            input_splits=self.output_splits,
            group_name=mesh.get_group().group_name,
        )

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, w in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])))

        return distribute_module(module, mesh, shard, self._dispatch, self._combine)


def tutorial_flow(mesh: DeviceMesh, rank: int) -> None:
    """Hand-made styles on our functions, and our style on hand-made experts, agree bit for bit; on a mesh of 2."""
    results = []
    counts = torch.tensor([[5, 0, 9, 2, 0, 0, 7, 1], [0, 0, 3, 0, 0, 6, 0, 15]])[mesh.get_local_rank()]
    rows = torch.randn(24, D, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for style in (HandMadeStyle(), ExpertParallel(gradients="sum")):
        torch.manual_seed(0)
        experts = parallelize_module(Experts(), mesh, style)
        x = rows.clone().requires_grad_()
        y = experts(x, counts)
        F.mse_loss(y, torch.ones_like(y)).backward()
        grads = [p.grad.to_local() for p in experts.parameters()]
        assert (y.shape, y.dtype, x.grad.dtype) == (x.shape, torch.bfloat16, torch.bfloat16)
        results.append([y, x.grad, *grads])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert all((grad != 0).any() for grad in results[0])
