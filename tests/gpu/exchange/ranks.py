"""Checks of expert parallelism in training over NCCL, and of every transport, one process per GPU. test_ranks.py runs

torchrun --standalone --nproc-per-node N -m tests.gpu.exchange.ranks [WORDS]      WORDS: of the names of checks to run
torchrun --standalone --nproc-per-node N -m tests.gpu.exchange.ranks alone NAME   rank 0 gets an error while rows move

Rank 0 prints the name of each check before it starts. `alone` ends the processes; NAME is a transport. Over Collectives
the watchdog of NCCL ends the other ranks, without a word of theirs: it frees the kernels that wait before it ends the
process, which goes on in between.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from mxep.torch_frontend import Collectives, CopyEngines, PeerMemory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from ...torch_frontend.exchange import ep_replicas, ep_skips
from ...torch_frontend.layer import ep_training
from ...torch_frontend.overlap import ep_overlap, ep_peers
from . import peer_graph

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
    # One rank has nothing to sum before it sends.
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
        checks = {n: partial(check, transport) for n, check in ep_overlap.CHECKS.items()}
        yield type(transport).__name__, checks | ep_skips.checks(mesh, transport, ep_skips.E // mesh.size())

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


def alone(mesh: DeviceMesh, name: str) -> NoReturn:
    """Rank 0 gets an error in a chunk and stays away; the GPUs of the others end their wait for it with an error."""
    group, rank, limit = mesh.get_group(), mesh.get_local_rank(), timedelta(seconds=10)
    transports = {
        "CopyEngines": lambda: CopyEngines(group, chunk_bytes=1, timeout=limit),
        "PeerMemory": lambda: PeerMemory(group, 4096, timeout=limit),
        "Collectives": lambda: Collectives(group, chunk_bytes=1),
    }
    layer = ep_skips.layer(mesh, transports[name]())
    ep_skips.step(layer, 0, rank)
    torch.cuda.synchronize()
    start, end = time.monotonic(), "no error"
    try:
        if rank == 0:
            with ep_skips.failing("forward", 0):
                ep_skips.step(layer, 1, rank)
        else:
            ep_skips.step(layer, 1, rank)
            torch.cuda.synchronize()
            if name == "Collectives":
                time.sleep(120)
    except RuntimeError as error:
        end = f"{type(error).__name__}: {error}".splitlines()[0]
    seconds = time.monotonic() - start
    right = end == "Skipped: no memory in the forward" if rank == 0 else "CUDA error" in end
    verdict = "ended as it should" if right and seconds < 60 else "WRONG"
    print(f"alone: {name}: rank {rank} {verdict} after {seconds:.1f} s: {end}", flush=True)
    if rank == 0:
        time.sleep(60)  # a process that ends would end the others, by the launcher
    os._exit(0)


def main(words: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=20) if words.startswith("alone ") else LIMIT)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    if words.startswith("alone "):
        alone(mesh, words.removeprefix("alone "))
    run(f"{mesh.size()} ranks", training(mesh), words)
    for name, checks in transports(mesh) if mesh.size() > 1 else ():
        run(name, checks, words)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
