"""The group of ranks, a layer over it and its batch, for the checks of ep_ranks.py."""

from functools import cache

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import ExpertParallel, MoE
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from ...layer_options import layer_options

D, HIDDEN, E, TOP_K, TOKENS = 64, 96, 8, 2, 48


@cache
def mesh_of(ep: int) -> DeviceMesh:
    """This rank's group of `ep` consecutive ranks, one for all checks: a thread of every group polls 100 times a
    second."""
    return init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("replica", "ep"))["ep"]


def parallel_layer(
    ep: int, recipe: Recipe | str = "mxfp8_wgrad_with_hp", seed: int = 0, transport=None, deduplicate=None, **options
) -> tuple[MoE, DeviceMesh]:
    torch.manual_seed(seed)
    moe, mesh = MoE(D, HIDDEN, E, recipe=recipe, **layer_options(TOP_K, **options)), mesh_of(ep)
    carried = None if transport is None else transport(mesh.get_group())
    style = ExpertParallel(gradients="sum", transport=carried, deduplicate=deduplicate)
    parallelize_module(moe.experts, mesh, style)
    return moe, mesh


def batch(seed: int = 1) -> Tensor:
    return torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(seed))
