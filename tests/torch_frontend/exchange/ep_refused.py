"""What all ranks refuse alike, with words; run by ep_ranks.py. What is wrong on one of them: ep_errors.py."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from mxep.torch_frontend import (
    ExpertParallel,
    MoE,
    MXTensor,
    PeerMemory,
    RouterConfig,
    SharedExpert,
    dispatch,
)
from mxep.torch_frontend.integrations.frozen import freeze_weights
from mxep.torch_frontend.integrations.torchao import a2a_dispatch_mxfp8_fwd_hp_bwd
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .ep_world import HIDDEN, TOP_K, D, E, batch, mesh_of, parallel_layer


def raises(error: type[Exception], words: str, run: Callable[[], object]) -> None:
    with pytest.raises(error, match=re.escape(words)):
        run()


def bad_input() -> None:
    mesh = mesh_of(4)
    name, x = mesh.get_group().group_name, batch()[:8]
    send = a2a_dispatch_mxfp8_fwd_hp_bwd
    fair = [2, 2, 2, 2]
    raises(ValueError, "input_splits: got [2, 2, 2, 1], in total 7; allowed: a total of 8",
           lambda: send(x, fair, [2, 2, 2, 1], name))  # fmt: skip
    raises(ValueError, "output_splits: got [4, 4]; allowed: 4 counts", lambda: send(x, [4, 4], fair, name))
    raises(ValueError, "input_splits: got [9, -1, 0, 0]", lambda: send(x, fair, [9, -1, 0, 0], name))
    raises(ValueError, "block_size: got 16; allowed: 32", lambda: send(x, fair, fair, name, block_size=16))
    raises(TypeError, "input: got dtype torch.float16", lambda: send(x.half(), fair, fair, name))
    raises(ValueError, "allowed: (M, K) with K a multiple of 32", lambda: send(x[:, :40], fair, fair, name))
    raises(TypeError, "input: got an MXTensor", lambda: send(MXTensor.quantize(x), fair, fair, name))
    torch.manual_seed(0)
    odd = MoE(D, HIDDEN, 6, RouterConfig(TOP_K))
    raises(ValueError, "w1: got 6 experts; allowed: a number of experts that the mesh of 4 ranks divides",
           lambda: parallelize_module(odd.experts, mesh, ExpertParallel()))  # fmt: skip
    assert not isinstance(odd.experts.w1, DTensor)
    for part, weight in (("experts", "experts.w1"), ("shared_expert", "shared_expert.w1")):
        frozen = MoE(D, HIDDEN, E, RouterConfig(TOP_K), shared=SharedExpert(HIDDEN))
        freeze_weights(frozen.get_submodule(part).requires_grad_(False))
        raises(ValueError, f"ExpertParallel: module: got {weight} as an MXTensor; allowed: values of bf16 or fp32",
               lambda moe=frozen: parallelize_module(moe, mesh, ExpertParallel()))  # fmt: skip
        assert not any(isinstance(p, DTensor) for p in frozen.parameters())
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    raises(ValueError, "device_mesh: got 2 dims", lambda: ExpertParallel()._apply(odd.experts, grid))
    raises(ValueError, "recipe", lambda: ExpertParallel("bf16")._apply(odd.experts, mesh))
    raises(NotImplementedError, "PeerMemory: group: got no CUDA", lambda: PeerMemory(mesh.get_group()))
    raises(ValueError, "recipe: got 'fp4'", lambda: ExpertParallel("fp4"))
    moe, _ = parallel_layer(4)
    raises(ValueError, "parallel already", lambda: parallelize_module(moe.experts, mesh, ExpertParallel()))
    rows = x.bfloat16()
    raises(
        ValueError, "padded_counts: got shape (3,); allowed: (2,)", lambda: moe.experts(rows, torch.tensor([4, 4, 0]))
    )
    exchange = partial(dispatch, rows, group=name)
    raises(ValueError, "(E,) with E a multiple of 4", lambda: exchange(torch.tensor([4, 4, 0])))
    raises(ValueError, "dispatch: counts", lambda: exchange(torch.ones(E, dtype=torch.int32)[:4] * 3))


class SplitExperts(ParallelStyle):
    """Weights as DTensors, and nothing else, as styles of other packages for their own experts have them."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, w in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(w, device_mesh, [Shard(self.dim)])))
        return module


def other_styles() -> None:
    """A layer that another style has sharded says so, and so does one that is given a DTensor."""
    mesh, x = mesh_of(2), batch()[:8]
    plans = {
        "MoE: parameters: got a DTensor (8, 64) with (Shard(dim=0),)": {
            "router": ColwiseParallel(), "experts": ExpertParallel(),
        },
        "MoE: parameters: got a DTensor (8, 64) with (Shard(dim=1),)": {"router": RowwiseParallel()},
        "GroupedExperts: parameters: got a DTensor (8, 96, 64) with (Shard(dim=0),)": {"experts": SplitExperts(0)},
        "MoE: parameters: got a DTensor (1, 64, 64) with (Shard(dim=1),)": {"shared_expert": SplitExperts(1)},
    }  # fmt: skip
    for words, plan in plans.items():
        moe = parallelize_module(MoE(D, HIDDEN, E, RouterConfig(TOP_K), shared=SharedExpert(64)), mesh, plan)
        raises(TypeError, f"{words} of another style; allowed: plain tensors, or parallelize_module(", partial(moe, x))
    moe = MoE(D, HIDDEN, E, RouterConfig(TOP_K))
    raises(
        TypeError,
        "MoE: x: got a DTensor; allowed: this rank's tensor",
        lambda: moe(distribute_tensor(x, mesh, [Replicate()])),
    )
    moe = fully_shard(MoE(D, HIDDEN, E, RouterConfig(TOP_K)), mesh=mesh)
    raises(ValueError, "module: got w1 as a DTensor; allowed: plain parameters; apply this style first",
           lambda: parallelize_module(moe, mesh, ExpertParallel()))  # fmt: skip


def group_that_is_gone() -> None:
    """As after destroy_process_group and another init_process_group."""
    group = dist.new_group([0, 1])
    if dist.get_rank() >= 2:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    moe = parallelize_module(MoE(D, HIDDEN, E, RouterConfig(TOP_K)), mesh, ExpertParallel())
    dist.destroy_process_group(group)
    words = f"MoE: group: got '{group.group_name}', which has been destroyed; build and shard"
    raises(RuntimeError, words, partial(moe, batch()[:8]))
