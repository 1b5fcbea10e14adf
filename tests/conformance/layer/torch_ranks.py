"""The expert-parallel runs in PyTorch, on four ranks; test_layer.py runs them and reads their results.

A group of `ep` ranks shares the experts; with four processes and ep = 1 or 2 there are several groups with the
same tokens.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from mxep import torch_frontend as mxep
from mxep.torch_frontend.integrations.torchao import a2a_combine_hp_fwd_mxfp8_bwd, a2a_dispatch_mxfp8_fwd_hp_bwd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...compare import to_numpy
from ..backends.arrays import to_torch
from ..backends.torch import moe_module
from .layers import LAYERS, RANKED_RUNS, RANKS, RUNS, WIRE, Layer, Wire


@cache
def mesh_of(degree: int) -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS // degree, degree), mesh_dim_names=("dp", "ep"))["ep"]


def layer(case: Layer, recipe: str, mesh: DeviceMesh) -> dict[str, np.ndarray]:
    """This rank's y, statistics, and gradients of x, of the router (its share) and of its experts."""
    moe = moe_module(case.params, RUNS[recipe], **case.options)
    parallelize_module(moe.experts, mesh, mxep.ExpertParallel(gradients="sum"))
    rows = np.array_split(np.arange(len(case.x)), mesh.size())[mesh.get_local_rank()]
    x = to_torch(case.x[rows]).requires_grad_()
    y, stats = moe(x)
    y.backward(to_torch(case.dy[rows]))
    results = {"y": y, "counts": stats.counts, "x": x.grad, "router": moe.router.weight.grad}
    for name, parameter in moe.experts.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        results[name] = parameter.grad.to_local()
    return {name: to_numpy(tensor) for name, tensor in results.items()}


def wire(case: Wire, mesh: DeviceMesh) -> dict[str, np.ndarray]:
    """The bytes that this rank receives: dispatch forward and combine backward; and the two bf16 all-to-alls."""
    rank, group = mesh.get_local_rank(), mesh.get_group()
    sent, received = case.splits[rank], [row[rank] for row in case.splits]
    rows = to_torch(case.rows[rank]).requires_grad_()
    there = a2a_dispatch_mxfp8_fwd_hp_bwd(rows, received, sent, group)
    there.backward(to_torch(case.received()[rank]))

    expert_out = to_torch(case.received()[rank]).requires_grad_()
    back = a2a_combine_hp_fwd_mxfp8_bwd(expert_out, sent, received, group)
    (grad,) = torch.autograd.grad(back, expert_out, to_torch(case.rows[rank]))
    results = {"q": there.q, "sf": there.sf, "rows.grad": rows.grad, "back": back, "grad.q": grad.q, "grad.sf": grad.sf}
    return {name: to_numpy(tensor) for name, tensor in results.items()}


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    assert ranks == RANKS
    layers = {
        f"{degree}/{name}/{run}": lambda of=(name, run, degree): layer(LAYERS[of[0]], of[1], mesh_of(of[2]))
        for name, run, degree in RANKED_RUNS
    }
    return layers | {f"wire/{name}": lambda case=case: wire(case, mesh_of(RANKS)) for name, case in WIRE.items()}
