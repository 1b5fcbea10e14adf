"""Checks of expert parallelism in training over NCCL, and over PeerMemory, one process per GPU. test_ranks.py runs
each as a test; without pytest

torchrun --standalone --nproc-per-node N -m tests.gpu.exchange.ranks [WORDS]      WORDS: of the names of checks to run
torchrun --standalone --nproc-per-node N -m tests.gpu.exchange.ranks alone   rank 0 gets an error while the others wait

Rank 0 prints the name of each check before it starts. `alone` ends the processes.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mxep.torch_frontend import PeerMemory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from ...contracts.table import ON_GPUS, allowed, name_of, pairwise
from ...contracts.torch_layers import contracts_of_ranks
from ...torch_frontend.exchange import ep_replicas
from ...torch_frontend.layer import ep_training
from ...torch_frontend.overlap import ep_device, ep_device_mm, ep_overlap, ep_peers, ep_rounds, ep_skips
from . import device_graph, peer_graph

PROGRAMS = (
    ("mxfp8_wgrad_with_hp", "mean", "combine"),
    ("mxfp8", "mean", "swiglu"),
    ("mxfp8", "sum", "combine"),
    ("bf16", "sum", "combine"),
)
OFFLOADED = {"with weights on the GPU": None, "with weights on the CPU": CPUOffloadPolicy()}
LIMIT = timedelta(seconds=60)
Check = Callable[[], object]

# A check that catches an error of a capture leaves a graph in a reference cycle, as in tests/gpu/conftest.py.
torch.compiler.config.force_cudagraph_gc = True


@cache
def world() -> DeviceMesh:
    return init_device_mesh("cuda", (dist.get_world_size(),))


@cache
def pair() -> DeviceMesh:
    return init_device_mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))


def training(ranks: int) -> dict[str, Check]:
    # One rank has nothing to sum before it sends.
    of_replicas = ep_replicas.CHECKS if ranks > 1 else {}
    return {
        **{f"trains {p}": lambda p=p: ep_training.ranks_train_as_one_process(world(), *p) for p in PROGRAMS},
        "one norm, one optimizer": lambda: ep_training.one_norm_one_optimizer(world()),
        "saved, moved and cast": lambda: ep_training.saved_moved_and_cast(world()),
        **{f"one data rank {n}": lambda of=of: ep_training.one_data_rank(pair(), of) for n, of in OFFLOADED.items()},
        **{f"replicas {n}": lambda check=check: check(world().get_group()) for n, check in of_replicas.items()},
    }


def opened(rows: int | None, **options: Any) -> PeerMemory:
    memory = PeerMemory.choose(world().get_group(), rows, timeout=LIMIT, **options)
    assert memory is not None, "the log of mxep says why"
    return memory


@cache
def peer_memory() -> PeerMemory:
    return opened(ep_overlap.MOST_TOKENS * ep_overlap.TOP_K * dist.get_world_size())


@cache
def growing_memory() -> PeerMemory:
    return opened(None, on_overflow="nan")


def contracts() -> dict[str, Check]:
    """Of docs/determinism.md: the pairs of the table. One process: tests/gpu/layer/test_contracts.py."""
    rows = [row for row in pairwise(ON_GPUS, allowed) if row["exchange"] != "one process"]
    return {name_of(row): lambda row=row: contracts_of_ranks(row, world(), growing_memory) for row in rows}


def over(transport: Callable[[], Any], of: dict[str, Callable[[Any], None]]) -> dict[str, Check]:
    return {name: lambda check=check: check(transport()) for name, check in of.items()}


def checks(ranks: int) -> dict[str, Check]:
    ep_device.count_runs()
    groups = {f"{ranks} ranks": training(ranks)}
    if ranks > 1:
        groups["contracts"] = contracts()
        of_memory = ep_peers.checks(world, opened) | ep_rounds.checks(False, opened) | peer_graph.checks(world, opened)
        groups["PeerMemory"] = over(peer_memory, ep_overlap.CHECKS) | of_memory
        driven = world, opened, lambda: opened(None)
        of_device = ep_device.checks(*driven) | ep_device_mm.checks(*driven)
        groups["driven by the device"] = of_device | ep_rounds.checks(True, opened) | device_graph.checks(world, opened)
    return {
        f"{group}: {name}": partial(synchronized, check) for group, of in groups.items() for name, check in of.items()
    }


def synchronized(check: Check) -> None:
    check()
    torch.cuda.synchronize()  # an error of the GPU belongs to this check


def alone(mesh: DeviceMesh) -> NoReturn:
    """Rank 0 gets an error and stays away; the GPUs of the others end their wait for it with an error."""
    group, rank, limit = mesh.get_group(), mesh.get_local_rank(), timedelta(seconds=10)
    layer = ep_skips.layer(mesh, PeerMemory(group, 4096, timeout=limit))
    ep_skips.step(layer, 0, rank)
    torch.cuda.synchronize()
    start, end = time.monotonic(), "no error"
    try:
        if rank == 0:
            with ep_skips.failing("forward"):
                ep_skips.step(layer, 1, rank)
        else:
            ep_skips.step(layer, 1, rank)
            torch.cuda.synchronize()
    except RuntimeError as error:
        end = f"{type(error).__name__}: {error}".splitlines()[0]
    seconds = time.monotonic() - start
    right = end == "Skipped: no memory in the forward" if rank == 0 else "CUDA error" in end
    verdict = "ended as it should" if right and seconds < 60 else "WRONG"
    print(f"alone: rank {rank} {verdict} after {seconds:.1f} s: {end}", flush=True)
    if rank == 0:
        time.sleep(60)  # a process that ends would end the others, by the launcher
    os._exit(0)


def main(words: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=20) if words == "alone" else LIMIT)
    if words == "alone":
        alone(world())
    chosen = {name: check for name, check in checks(dist.get_world_size()).items() if words in name}
    for name, check in chosen.items():
        if dist.get_rank() == 0:
            print(name, flush=True)
        check()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{len(chosen)} checks passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
