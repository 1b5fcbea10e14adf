"""One of two ranks dies or hangs in mid step; test_deaths.py starts both, and measures the end of the other.

    python -m tests.gpu.exchange.deaths RANK PORT EXCHANGE [PHASE SIGNAL]

A phase is a call that a step makes, on every rank in the same order. The victim gets its signal when it is about to
make the call, in its third step, after all work before the call has ended on its GPU; with IN_FLIGHT, while that work
runs. Without a phase, both ranks make three steps and end. PORT: of the store, in the starting process.

Without a GPU the ranks are processes of a CPU, as in tests/torch_frontend/overlap/device_ranks.py.
"""

import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import ExpertParallel, MoE, PeerMemory, RouterConfig
from mxep.torch_frontend.exchange import shards
from mxep.torch_frontend.overlap import local_experts
from mxep.torch_frontend.overlap.mapped_memory import MappedMemory
from mxep.torch_frontend.overlap.prepared import Prepared
from mxep.torch_frontend.products import ffn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from ...torch_frontend.overlap.ep_rounds import overlaps

RANKS, VICTIM, LIMIT = 2, 1, 10
"""LIMIT: of the process group and of PeerMemory, in seconds."""
START = timedelta(seconds=120)
IN_FLIGHT = "in flight"
D, E, TOP_K, TOKENS = 512, 10, 2, 24
HIDDEN = {"cpu": 64, "cuda": 2048}
BEFORE, BACKWARD, EXPERTS, GRADIENTS = "before", "backward", "experts", "gradients of experts"
REDUCE, EXCHANGE, BARRIER, PROGRAM = "all-reduce of the router's gradient", "all-to-all", "barrier", "program"
PULL, PUSH = [BARRIER, PROGRAM], [PROGRAM, BARRIER]
"""Of one direction, before and after its products."""
PHASES = {
    "device": [BEFORE, *PULL, BARRIER, BACKWARD, *PULL, BARRIER, REDUCE],
    "bf16": [BEFORE, *PULL, EXPERTS, *PUSH, BACKWARD, *PULL, GRADIENTS, *PUSH, REDUCE],
    "all-to-all": [BEFORE, *[EXCHANGE] * 3, EXPERTS, EXCHANGE, BACKWARD, EXCHANGE, GRADIENTS, *[EXCHANGE] * 2, REDUCE],
    "all-reduce": [BEFORE],
}  # fmt: skip
"""By exchange. "device" and "bf16" are over PeerMemory; "all-reduce" is torch's, and nothing else."""
KILL, STOP = "KILL", "STOP"
Layer = Callable[[Tensor], Tensor]

noted: list[str] = []
fatal: list[tuple[int, str]] = []
"""The phase and the signal of this rank, if it is the victim."""


def note(phase: str) -> None:
    """This rank is about to make this call."""
    for number, kind in fatal:
        if len(noted) == number:
            die(kind)
    noted.append(phase)


def die(kind: str) -> None:
    name, _, when = kind.partition(" ")
    if torch.cuda.is_available() and when != IN_FLIGHT:
        torch.cuda.synchronize()
    print(f"dies at {time.monotonic()}", flush=True)
    os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


def watch(owner: Any, name: str, phase_of: Callable[..., str]) -> None:
    """phase_of(*args): the phase of a call with these arguments."""
    real = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        note(phase_of(*args))
        return real(*args, **options)

    setattr(owner, name, watched)


def watch_all() -> None:
    watch(MappedMemory, "barrier", lambda *_: BARRIER)
    watch(Prepared, "__call__", lambda *_: PROGRAM)
    watch(dist, "all_to_all_single", lambda *_: EXCHANGE)
    watch(shards, "all_reduce", lambda *_: REDUCE)
    for owner in (ffn, local_experts):
        watch(owner, "ffn_forward", lambda *_: EXPERTS)
    watch(ffn.FFNBackward, "__init__", lambda *_: GRADIENTS)


def join(rank: int, port: int) -> tuple[str, Callable[..., PeerMemory]]:
    """The process group of both ranks. Returns the type of the device, and what opens PeerMemory of a group there."""
    limit, on_gpu = timedelta(seconds=LIMIT), torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, timeout=START)  # pyright: ignore[reportPrivateImportUsage]
    store.set(f"imported {rank}", "")  # which takes longer than the limit where many processes start
    store.wait([f"imported {r}" for r in range(RANKS)], START)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=limit)
    if on_gpu:
        return "cuda", PeerMemory
    from ...torch_frontend.overlap import device_ranks  # replaces kernels of GPUs

    device_ranks.begin(rank)
    return "cpu", device_ranks.files().open


def make(exchange: str, device: str, opened: Callable[..., PeerMemory]) -> tuple[Layer, PeerMemory | None]:
    if exchange == "all-reduce":
        return all_reduce, None
    mesh, memory = init_device_mesh(device, (RANKS,)), None
    if exchange != "all-to-all":
        memory = opened(mesh.get_group(), TOKENS * TOP_K * RANKS, timeout=timedelta(seconds=LIMIT))
    recipe = Recipe.parse("bf16") if exchange == "bf16" else Recipe.parse("mxfp8", compute="fold")
    torch.manual_seed(0)
    moe = MoE(D, HIDDEN[device], E, RouterConfig(TOP_K), recipe=recipe, dtype=torch.bfloat16, device=device)
    parallelize_module(moe, mesh, ExpertParallel(transport=memory))
    return lambda x: moe(x)[0], memory


def all_reduce(x: Tensor) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return y.requires_grad_()


def step(layer: Layer, device: str) -> None:
    """Ends when the GPU has ended it, as a step that reads the loss."""
    noted.clear()
    note(BEFORE)
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(dist.get_rank()))
    y = layer(x.bfloat16().to(device).requires_grad_())
    if y.grad_fn is not None:
        note(BACKWARD)
    y.square().sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()


def run(rank: int, port: int, exchange: str, death: list[str]) -> None:
    """Steps, and the death in the third: a rank that has sent its rows is missed by a later step."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    device, opened = join(rank, port)
    layer, memory = make(exchange, device, opened)
    step(layer, device)  # the first step compares arguments and maps memory
    watch_all()
    step(layer, device)
    if noted != PHASES[exchange]:
        raise AssertionError(f"phases: got {noted}; allowed: {PHASES[exchange]}")
    if memory is not None and overlaps(memory) != (exchange == "device"):
        raise AssertionError(f"{exchange}: {len(memory.programs)} programs, which overlap or do not")
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
    print("ready", flush=True)
    if death and rank == VICTIM:
        fatal.append((int(death[0]), death[1]))
    for _ in range(3 if death else 1):
        step(layer, device)
    if not death:
        dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
