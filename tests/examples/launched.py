"""Programs of examples/ on ranks, as torchrun starts them, in forks of a process that has imported torch.

The name of a check is [program, port of the store, arguments ...] in JSON; the result of a rank is what it printed.
"""

import io
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from unittest import mock

import torch

from examples.training import torch_fsdp_ep, train_torch

from ..ranks.fixture import Ranks

PROGRAMS = {program.__name__: program for program in (train_torch, torch_fsdp_ep)}
RANK: list[int] = []


def begin(rank: int) -> None:
    torch.set_num_threads(1)
    RANK.append(rank)


def run(ranks: int, name: str) -> str:
    program, port, *arguments = json.loads(name)
    set_by_torchrun = {"RANK": RANK[0], "LOCAL_RANK": RANK[0], "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {key: str(value) for key, value in set_by_torchrun.items()}
    printed = io.StringIO()
    # Where Gloo runs, a program ends its process, which has to answer first.
    with redirect_stdout(printed), mock.patch.object(os, "_exit"):
        PROGRAMS[program].main(arguments)
    return printed.getvalue()


class Checks(dict[str, Callable[[], str]]):
    """Any name is a check."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def __missing__(self, name: str) -> Callable[[], str]:
        return partial(run, self.ranks, name)


def checks(ranks: int) -> Mapping[str, Callable[[], str]]:
    return Checks(ranks)


def launch(ranks: Ranks, program: str, arguments: Sequence[str]) -> str:
    """What rank 0 of new processes printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    printed = ranks.run(json.dumps([program, port, *arguments]))
    ranks.stop()
    return printed[0]
