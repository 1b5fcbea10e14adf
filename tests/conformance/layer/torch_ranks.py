"""The ranks of the expert-parallel runs in PyTorch, four for test_layer.py.

    arguments: RANKS STORE OUT     results: OUT/rank{rank}.npz, key "degree/case/recipe/what"

A group of `ep` ranks shares the experts; with four processes and ep = 1 or 2 there are several groups with the
same tokens. gloo uses a file store, so that no port is needed.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mxep import torch_frontend as mxep
from mxep.torch_frontend.integrations.torchao import a2a_combine_hp_fwd_mxfp8_bwd, a2a_dispatch_mxfp8_fwd_hp_bwd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.compare import to_numpy
from tests.conformance.backends.arrays import to_torch
from tests.conformance.backends.torch import moe_module
from tests.conformance.cases import BF16
from tests.conformance.layer.layers import LAYERS, RANKED_RUNS, RUNS, WIRE, Layer, Wire
from tests.torch_frontend.forked import fork_ranks

DEGREES = (1, 2, 4)


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


def main(rank: int, ranks: int, store: str, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    results = {}
    for degree in DEGREES:
        mesh = init_device_mesh("cpu", (ranks // degree, degree), mesh_dim_names=("dp", "ep"))["ep"]
        for name, recipe in (case[:2] for case in RANKED_RUNS if case[2] == degree):
            values = layer(LAYERS[name], recipe, mesh)
            results |= {f"{degree}/{name}/{recipe}/{key}": value for key, value in values.items()}
        if degree == ranks:
            for name, case in WIRE.items():
                results |= {f"wire/{name}/{key}": value for key, value in wire(case, mesh).items()}
    # bf16 is saved as its bits: npz knows no ml_dtypes
    bits = {key: v.view(np.uint16) if v.dtype == BF16 else v for key, v in results.items()}
    np.savez(out / f"rank{rank}.npz", **bits)
    dist.barrier()  # a rank that leaves while another still sends to it breaks its connection
    os._exit(0)  # gloo's threads may still drop tensors, which aborts while Python ends


if __name__ == "__main__":
    count = int(sys.argv[1])
    main(fork_ranks(count), count, sys.argv[2], Path(sys.argv[3]))
