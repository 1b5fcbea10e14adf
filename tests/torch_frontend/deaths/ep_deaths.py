"""One of three ranks dies or hangs in mid step, over gloo: the others end with an error; run by test_ep_deaths.py and,
over PeerMemory, by test_peer_deaths.py.

A phase is a call that a step makes, on every rank in the same order. The victim gets its signal when it is about to
make the call, in its second step.
"""

import gc
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mxep.torch_frontend import ExpertParallel, MoE, RouterConfig
from mxep.torch_frontend.exchange import shards
from mxep.torch_frontend.overlap import local_experts
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_mm
from mxep.torch_frontend.products import ffn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

RANKS, VICTIM, LIMIT = 3, 1, 5
"""LIMIT: of the process group that exchanges rows, in seconds."""
D, F, E, TOP_K, TOKENS = 64, 32, 6, 2, 24
BEFORE, BACKWARD, EXPERTS, GRADIENTS = "before", "backward", "experts", "gradients of experts"
REDUCE = "all-reduce of the router's gradient"
EXCHANGE, SENT = "all-to-all", "wait for rows"


def all_to_alls(before: int) -> list[str]:
    """The phases of a step with so many exchanges before the experts."""
    one = [EXCHANGE, SENT]
    return [BEFORE, *one * before, EXPERTS, *one, BACKWARD, *one, GRADIENTS, *one * 2, REDUCE]


PHASES = {
    "AllToAll": all_to_alls(3),
    "AllToAll dispatch": all_to_alls(4),
    "AllToAll both": all_to_alls(4),
    "function": [BEFORE],
}
Layer = Callable[[Tensor], Tensor]


class Death(NamedTuple):
    """The signal that the victim gets, at the phase of this number."""

    exchange: str
    phase: int
    signal: str


class Survivor(NamedTuple):
    """seconds: from the step of the death to the error. left: memory in /dev/shm, and child processes. pids: of all
    ranks."""

    seconds: float
    error: str
    left: list[str]
    pids: list[int]


def deaths(exchange: str, phases: list[str]) -> dict[str, Death]:
    """By names, both signals at each phase of an exchange."""
    signals = "KILL", "STOP"
    return {f"{exchange}, {i} {phase}, {s}": Death(exchange, i, s) for i, phase in enumerate(phases) for s in signals}


DEATHS = {name: death for exchange, phases in PHASES.items() for name, death in deaths(exchange, phases).items()}
NOTED: list[str] = []
FATAL: list[Death] = []


def note(phase: str) -> None:
    """A rank is about to make this call."""
    for death in FATAL:
        if len(NOTED) == death.phase:
            os.kill(os.getpid(), signal.Signals[f"SIG{death.signal}"])
    NOTED.append(phase)


def watch(owner: Any, name: str, phase: str) -> None:
    real = getattr(owner, name)

    def watched(*args: Any, **options: Any) -> Any:
        note(phase)
        return real(*args, **options)

    setattr(owner, name, watched)


def begin(rank: int) -> None:
    real = dist.all_to_all_single

    def all_to_all_single(*args: Any) -> None:
        note(EXCHANGE)
        work = real(*args, async_op=True)
        assert work is not None
        note(SENT)
        work.wait()

    dist.all_to_all_single = all_to_all_single
    watch(shards, "all_reduce", REDUCE)
    for owner in (ffn, local_experts):
        watch(owner, "ffn_forward", EXPERTS)
    watch(ffn.FFNBackward, "__init__", GRADIENTS)


def layer(exchange: str) -> Layer:
    """The function does not know the number of experts: its ranks compare sizes before they exchange counts."""
    group = limited_group()
    deduplicate: Any = exchange.partition(" ")[2] or None
    if exchange == "function":
        w, counts = torch.ones(E // RANKS, F, D), torch.full((E,), TOKENS // E)
        return lambda x: expert_parallel_mm(x, w, counts, group=group)
    return sharded(ExpertParallel(deduplicate=deduplicate), group)


def limited_group() -> dist.ProcessGroup:
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    assert isinstance(group, dist.ProcessGroup)
    return group


def sharded(style: ExpertParallel, group: dist.ProcessGroup) -> Layer:
    torch.manual_seed(0)
    moe = parallelize_module(MoE(D, F, E, RouterConfig(TOP_K)), DeviceMesh.from_group(group, "cpu"), style)
    return lambda x: moe(x)[0]


def step(layer: Layer) -> None:
    NOTED.clear()
    note(BEFORE)
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    y = layer(x)
    note(BACKWARD)
    y.square().sum().backward()


def run(death: Death, make: Callable[[str], Layer], phases: list[str]) -> Survivor:
    """Steps until the error, three at most: a rank that has sent its rows is missed by the next collective alone."""
    pids: list[Any] = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    layer = make(death.exchange)
    step(layer)
    assert phases == NOTED or death.exchange == "function", NOTED
    dist.barrier()
    if dist.get_rank() == VICTIM:
        FATAL.append(death)
    start, error = time.monotonic(), "none"
    try:
        for _ in range(3):
            step(layer)
    except RuntimeError as found:
        error = str(found)
    seconds = time.monotonic() - start
    del layer
    gc.collect()
    dist.destroy_process_group()  # as the end of a script; the connections of this rank close
    left = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    left += Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return Survivor(seconds, error, left, pids)


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    assert ranks == RANKS
    return {name: partial(run, death, layer, PHASES[death.exchange]) for name, death in DEATHS.items()}
