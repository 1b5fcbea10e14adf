"""A step runs out of memory in its backward, by a limit of the system, and the script skips the batch; run by
test_out_of_memory.py, on one process and on two ranks over gloo.

    experts' gradients begin --> limit: what the process has + a margin --> torch's allocator raises --> no limit
"""

import ctypes
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mxep.torch_frontend import ExpertParallel, MoE, RouterConfig
from mxep.torch_frontend.products import ffn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

RANKS, LIMIT = 2, 10
D, F, E, TOP_K, TOKENS = 256, 512, 8, 2, 512
MIB = 2**20
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
EXCHANGES = {"AllToAll": None, "AllToAll dispatch": "dispatch", "AllToAll both": "both"}
ALLOCATOR = "can't allocate memory"


class Skipped(NamedTuple):
    """A step without memory. margin: what it could allocate, in bytes. left: bytes and tensors more than before."""

    margin: int
    error: str
    left: tuple[int, int]


def begin(rank: int) -> None:
    # Memory of this size is mapped on its own, and the system has it back when it is freed.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    torch.set_num_threads(1)


def mapped() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def alive() -> tuple[int, int]:
    """Bytes and tensors."""
    gc.collect()
    return mapped(), sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@contextmanager
def little_memory(margin: int) -> Iterator[None]:
    """From the beginning of the experts' gradients on."""
    real = ffn.FFNBackward.__init__

    def limited(self: ffn.FFNBackward, *args: Any) -> None:
        if resource.getrlimit(resource.RLIMIT_AS) == NO_LIMIT:
            resource.setrlimit(resource.RLIMIT_AS, (mapped() + margin, resource.RLIM_INFINITY))
        real(self, *args)

    ffn.FFNBackward.__init__ = limited  # type: ignore[method-assign]
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, NO_LIMIT)
        ffn.FFNBackward.__init__ = real  # type: ignore[method-assign]


def step(moe: MoE, rank: int = 0) -> list[Tensor]:
    """The output, and the gradients of x and of the parameters."""
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    y = moe(x)[0]
    found = [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *moe.parameters()))]
    return [t.to_local() if isinstance(t, DTensor) else t for t in found]


def skips(recipe: str) -> list[Skipped]:
    """Steps with more and more memory, until there is enough; each is followed by one that has the right bytes."""
    torch.manual_seed(0)
    moe, found, margin = MoE(D, F, E, RouterConfig(TOP_K), recipe=recipe), [], 0
    step(moe)
    want = step(moe)
    while True:
        before = alive()
        error = skipped(moe, margin)
        after = alive()
        assert all(map(torch.equal, step(moe), want)), margin
        if not error:
            return found
        found.append(Skipped(margin, error, (after[0] - before[0], after[1] - before[1])))
        margin += MIB


def skipped(moe: MoE, margin: int, rank: int = 0) -> str:
    """The error of a step with little memory."""
    try:
        with little_memory(margin):
            step(moe, rank)
    except (RuntimeError, MemoryError) as error:
        return str(error)
    return ""


def exchanges(exchange: str, who: str) -> list[tuple[float, str]]:
    """The seconds and the end of three steps, the second without memory on all ranks, which skip it; or of two steps:
    one rank alone ends its process, as its next collective would meet the others in another one."""
    rank, mesh, found = dist.get_rank(), init_device_mesh("cpu", (RANKS,)), []
    torch.manual_seed(0)
    style: Any = ExpertParallel(deduplicate=EXCHANGES[exchange])
    moe: Any = parallelize_module(MoE(D, F, E, RouterConfig(TOP_K)), mesh, style)
    want = step(moe, rank)
    for number in range(3 if who == "all" else 2):
        start = time.monotonic()
        try:
            if number == 1 and (who == "all" or rank == 0):
                end = skipped(moe, 0, rank)
            else:
                end = "right" if all(map(torch.equal, step(moe, rank), want)) else "other bytes"
        except RuntimeError as error:
            end = str(error)
        found.append((time.monotonic() - start, end))
        if who == "one" and ALLOCATOR in end:
            os._exit(1)
    return found


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    if ranks == 1:
        return {recipe: partial(skips, recipe) for recipe in ("mxfp8", "bf16")}
    return {
        f"{exchange}, {who}": partial(exchanges, exchange, who) for exchange, who in product(EXCHANGES, ("all", "one"))
    }
