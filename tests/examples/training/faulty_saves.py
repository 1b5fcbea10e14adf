"""`save_checkpoint` in processes that end, or get an error of the disk, at the n-th file operation, for all n.

    python -m tests.examples.training.faulty_saves kill|full BASE OUT

BASE/*   checkpoints before the save; copied to OUT/<n>, where a process saves a checkpoint of step 15
stdout   a line of JSON for each n: the operation, and the signal or the error that ended the save; the last has none

Operations: opening, writing (the fault comes when half of the bytes are written), flushing to disk, making and deleting
of files and folders, renaming. Python's audit events report them, but for writing and flushing.
"""

import errno
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.training.checkpoint import Checkpoint, save_checkpoint
from examples.training.config import PRESETS, describe
from examples.training.weights import initial_weights

TINY = PRESETS["tiny"]
RUN = describe(TINY, recipe="mxfp8")
STEP = 15
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def state(step: int) -> Checkpoint:
    weights = initial_weights(replace(TINY, seed=step))
    return Checkpoint(step, weights, {n: a + 1 for n, a in weights.items()}, {n: a + 2 for n, a in weights.items()})


class HalfWritten:
    """A file; `fault` comes when half of the bytes of a `write` are in it."""

    def __init__(self, file: Any, fault: Callable[[str, Path, bool], None]) -> None:
        self.file, self.fault = file, fault

    def __enter__(self) -> "HalfWritten":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> None:
        half = len(data) // 2
        self.file.write(data[:half])
        self.file.flush()
        self.fault("write", Path(self.file.name), False)
        self.file.write(data[half:])


def save_with_fault(kind: str, out: Path, number: int, tell: Callable[[str], object]) -> None:
    """Save a checkpoint; `tell` gets the operation before its fault. The system's error names the path of a call that
    takes one."""
    count, active = 0, True

    def fault(operation: str, path: Path, named: bool) -> None:
        nonlocal count, active
        count += active
        if active and count == number:
            active = False
            tell(f"{operation} {path.name}")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *[str(path)] * named)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event in EVENTS:
            fault(event.removeprefix("os."), Path(os.fspath(arguments[0])), True)

    really_open, really_sync = io.open, os.fsync

    def open_file(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = really_open(path, mode, *args, **options)
        return HalfWritten(file, fault) if "w" in mode else file

    def sync(descriptor: int) -> None:
        fault("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")), False)
        really_sync(descriptor)

    new = state(STEP)
    io.open, os.fsync = open_file, sync
    sys.addaudithook(audit)
    save_checkpoint(out, new, RUN)
    active = False


def run(kind: str, base: Path, folder: Path, number: int) -> dict[str, Any]:
    """What a process with a fault at this operation tells, and how it ended."""
    out = folder / str(number)
    shutil.copytree(base, out)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            save_with_fault(kind, out, number, lambda operation: os.write(writer, f"{operation}\n".encode()))
        except OSError as found:
            error = str(found)
        os.write(writer, error.encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as told:
        operation, _, error = told.read().partition("\n")
    return {"operation": operation, "error": error, "signal": os.waitstatus_to_exitcode(status)}


def main(kind: str, base: str, folder: str) -> None:
    number, found = 0, {"operation": "the first"}
    while found["operation"]:
        number += 1
        found = run(kind, Path(base), Path(folder), number)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
