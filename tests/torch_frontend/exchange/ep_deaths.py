"""One of three ranks dies or hangs in mid step, over gloo: the others end with an error; run by test_ep_deaths.py."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.torch_frontend import Collectives
from mxep.torch_frontend.exchange.counts import Request
from mxep.torch_frontend.exchange.shards import Ranks
from mxep.torch_frontend.overlap.expert_parallel import Overlapped
from mxep.torch_frontend.overlap.local_experts import MM

RANKS, VICTIM = 3, 1


class Stage(NamedTuple):
    """Where the rank ends: before `method` of a chunk of a transfer. `transfer`: 0 rows to experts, all chunks in one
    call, 1 rows to tokens, 2 and 3 their gradients; less than 0: the collectives before the transfers. limit: of the
    process group, in seconds."""

    where: str
    transfer: int
    method: str
    chunk: int
    ending: signal.Signals = signal.SIGKILL
    limit: int = 40


STAGES = {
    "before sizes are compared": Stage("forward", -2, "", 0),
    "before the counts": Stage("forward", -1, "", 0),
    "hangs": Stage("forward", 1, "send", 0, signal.SIGSTOP, 5),
    "after the counts": Stage("forward", 0, "send", 0),
    "rows sent to experts": Stage("forward", 0, "wait", 1),
    "rows sent to tokens": Stage("forward", 1, "send", 1),
    "backward": Stage("backward", 3, "send", 1),
}


class Fatal(Collectives):
    """Ends the process of the victim at a stage. Every rank has one, since the ranks compare their transports."""

    def __init__(self, group: dist.ProcessGroup, stage: str) -> None:
        super().__init__(group, chunk_bytes=1)
        self.stage, self.transfers = STAGES[stage], 0

    def open_transfer(self, *arguments):
        transfer, stage = super().open_transfer(*arguments), self.stage
        if self.group.rank() == VICTIM and self.transfers == stage.transfer:
            real = getattr(transfer, stage.method)

            def fatal(chunks: int | range) -> None:
                if stage.chunk in (chunks if isinstance(chunks, range) else (chunks,)):
                    os.kill(os.getpid(), stage.ending)
                real(chunks)

            setattr(transfer, stage.method, fatal)
        self.transfers += 1
        return transfer


def run(stage: str) -> tuple[str, float, str]:
    """Where this rank was, its seconds until the error, and the error."""
    assert dist.group.WORLD is not None
    # A rank is connected before the others know it: one that dies at once would end their first collective.
    dist.barrier()
    transport = Fatal(dist.group.WORLD, stage)
    x, w = (torch.ones(shape).bfloat16().requires_grad_() for shape in ((12, 64), (2, 32, 64)))
    # A layer knows the number of experts and begins with the counts; the function compares sizes first.
    experts = 6 if STAGES[stage].transfer == -1 else 0
    ranks = Ranks(dist.group.WORLD.group_name, RANKS, experts, "cpu")
    where, start = "forward", time.monotonic()
    if dist.get_rank() == VICTIM and STAGES[stage].transfer < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        recipe = RECIPES["mxfp8"]
        request = Request("test", x, torch.full((6,), 2), recipe, ranks, out_dtype=torch.bfloat16)
        rows, prob, handle = Overlapped(transport).dispatch(request)
        y = handle.run(MM(w, None, recipe), rows, prob)
        where, start = "backward", time.monotonic()
        y.sum().backward()
        error = "none"
    except RuntimeError as found:
        error = str(found)
    return where, time.monotonic() - start, error


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    assert ranks == RANKS
    return {stage: partial(run, stage) for stage in STAGES}
