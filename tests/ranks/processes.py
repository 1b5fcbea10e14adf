"""The template, which imports modules of checks and forks their ranks, and what a rank does. It starts no thread."""

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

MOST_RANKS = 64


class Group(NamedTuple):
    """What a rank has to know. limit: of the process group, in seconds; port: of its store; stacks: a file per rank."""

    module: str
    ranks: int
    backend: str | None
    limit: float
    port: int
    stacks: str


def serve(control: socket.socket) -> None:
    """Fork the ranks of each group that is asked for. Returns in no rank; ends with pytest's process."""
    children: set[int] = set()
    while True:
        message, files, *_ = socket.recv_fds(control, 4096, MOST_RANKS)
        if not message:
            for child in children:
                os.waitpid(child, 0)
            return
        group = Group(*json.loads(message))
        try:
            module = importlib.import_module(group.module)
        except BaseException:
            traceback.print_exc()
        else:
            gc.freeze()  # collections in the ranks do not touch, and so not copy, what they share
            for rank, file in enumerate(files):
                child = os.fork()
                children.add(child)
                if child == 0:
                    control.close()
                    for other in files:
                        if other != file:
                            os.close(other)
                    answer(module, group, rank, Connection(file))
        for file in files:
            os.close(file)


def answer(module: ModuleType, group: Group, rank: int, link: Connection) -> None:
    """Run the checks whose names come; ends the process with pytest's."""
    stacks = os.open(Path(group.stacks, f"stacks-{os.getpid()}"), os.O_CREAT | os.O_WRONLY)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable()
    link.send(os.getpid())

    def begin() -> None:
        if group.backend is not None:
            join(group, rank)
        if hasattr(module, "begin"):
            module.begin(rank)

    try:
        link.send(outcome(begin))
        checks = module.checks(group.ranks)
        while True:
            name = link.recv()
            link.send(outcome(checks[name]))
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # gloo's threads may still drop tensors, which aborts while Python ends


def outcome(run: Callable[[], Any]) -> Any:
    """(result,), or the traceback."""
    try:
        return (run(),)
    except BaseException:
        return traceback.format_exc()


def join(group: Group, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if group.backend == "nccl":
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=group.limit)
    store = dist.TCPStore("127.0.0.1", group.port, timeout=limit)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(group.backend, store=store, rank=rank, world_size=group.ranks, timeout=limit)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
