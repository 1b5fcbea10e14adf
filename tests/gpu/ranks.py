"""Checks of expert parallelism in training over NCCL, and of every transport, one process per GPU. test_ranks.py runs

torchrun --standalone --nproc-per-node N tests/gpu/ranks.py
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "torch_frontend"))
import ep_overlap
import ep_replicas
import ep_training
from mxep.torch_frontend import CopyEngines

PROGRAMS = (
    ("mxfp8_wgrad_with_hp", "mean", "combine"),
    ("mxfp8", "mean", "swiglu"),
    ("mxfp8", "sum", "combine"),
    ("bf16", "sum", "combine"),
)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for program in PROGRAMS:
        ep_training.ranks_train_as_one_process(mesh, *program)
    ep_training.one_norm_one_optimizer(mesh)
    ep_training.saved_moved_and_cast(mesh)
    transports = ep_overlap.Poisoned(mesh.get_group()), CopyEngines(mesh.get_group(), chunk_bytes=1)
    for transport in transports if mesh.size() > 1 else ():
        for check in ep_overlap.CHECKS.values():
            check(transport)
        if mesh.get_local_rank() == 0:
            print(f"{type(transport).__name__}: {len(ep_overlap.CHECKS)} checks passed")
    # One rank has nothing to sum before the wire.
    of_replicas = list(ep_replicas.CHECKS.values()) if mesh.size() > 1 else []
    for check in of_replicas:
        check(mesh.get_group())
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{mesh.size()} ranks: {len(PROGRAMS) + 2 + len(of_replicas)} checks passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
