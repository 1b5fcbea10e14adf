"""Checks of expert parallelism in training over NCCL, and of every transport, one process per GPU. test_ranks.py runs

torchrun --standalone --nproc-per-node N tests/gpu/ranks.py [WORDS]     WORDS: of the names of the checks to run

Rank 0 prints the name of each check before it starts.
"""

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

sys.path.insert(0, str(Path(__file__).parents[1] / "torch_frontend"))
import ep_overlap
import ep_peers
import ep_replicas
import ep_training
import peer_graph
from mxep.torch_frontend import CopyEngines, PeerMemory

PROGRAMS = (
    ("mxfp8_wgrad_with_hp", "mean", "combine"),
    ("mxfp8", "mean", "swiglu"),
    ("mxfp8", "sum", "combine"),
    ("bf16", "sum", "combine"),
)
OFFLOADED = {"with weights on the GPU": None, "with weights on the CPU": CPUOffloadPolicy()}
LIMIT = timedelta(seconds=60)
Check = Callable[[], object]


def training(mesh: DeviceMesh) -> dict[str, Check]:
    pair = init_device_mesh("cuda", (1, mesh.size()), mesh_dim_names=("dp", "ep"))
    # One rank has nothing to sum before the wire.
    of_replicas = ep_replicas.CHECKS if mesh.size() > 1 else {}
    return {
        **{f"trains {p}": partial(ep_training.ranks_train_as_one_process, mesh, *p) for p in PROGRAMS},
        "one norm, one optimizer": lambda: ep_training.one_norm_one_optimizer(mesh),
        "saved, moved and cast": lambda: ep_training.saved_moved_and_cast(mesh),
        **{f"one data rank {n}": partial(ep_training.one_data_rank, pair, of) for n, of in OFFLOADED.items()},
        **{f"replicas {n}": partial(check, mesh.get_group()) for n, check in of_replicas.items()},
    }


def transports(mesh: DeviceMesh) -> Iterator[tuple[str, dict[str, Check]]]:
    group = mesh.get_group()
    for transport in (ep_overlap.Poisoned(group), CopyEngines(group, chunk_bytes=1)):
        yield type(transport).__name__, {n: partial(check, transport) for n, check in ep_overlap.CHECKS.items()}

    def opened(rows: int | None) -> PeerMemory:
        return PeerMemory(group, rows, timeout=LIMIT)

    memory = opened(ep_overlap.MOST_TOKENS * ep_overlap.TOP_K * mesh.size())
    yield (
        "PeerMemory",
        {
            **{n: partial(check, memory) for n, check in ep_overlap.checks("swiglu").items()},
            **ep_peers.checks(mesh, opened),
            **peer_graph.checks(mesh, opened),
        },
    )


def run(name: str, checks: dict[str, Check], words: str) -> None:
    """All checks whose names have the words, and their number."""
    chosen = {f"{name}: {n}": check for n, check in checks.items() if words in f"{name}: {n}"}
    for title, check in chosen.items():
        if dist.get_rank() == 0:
            print(title, flush=True)
        check()
        torch.cuda.synchronize()  # an error of the GPU belongs to this check
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{name}: {len(chosen)} checks passed", flush=True)


def main(words: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=LIMIT)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    run(f"{mesh.size()} ranks", training(mesh), words)
    for name, checks in transports(mesh) if mesh.size() > 1 else ():
        run(name, checks, words)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
