"""One run at a time in an output folder: a lock that ends with its process, also when the process is killed.

DIR/lock    locked while a run writes to DIR; it contains the number of the process
"""

import fcntl
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .checkpoint import step_folders
from .config import LOG_NAME

LOCK_NAME = "lock"


def lock_folder(out: Path) -> TextIO:
    """Lock `out` until the file returned is closed or this process ends. Raises ValueError if it is locked."""
    out.mkdir(parents=True, exist_ok=True)
    file = (out / LOCK_NAME).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with file:
            file.seek(0)
            process = file.read() or "unknown"  # it has not written its number yet
        allowed = "allowed: another folder, or this one after the end of that process"
        raise ValueError(f"--out: {out} is in use by the run of process {process}; {allowed}") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def check_new(out: Path, resume: bool) -> None:
    """Raise ValueError if a new run would write over another one."""
    if ((out / LOG_NAME).exists() or step_folders(out)) and not resume:
        raise ValueError(f"--out: {out} already holds a run; pass --resume to continue it, or another folder")


def move_run(out: Path, to: Path) -> None:
    """Move a run, but not its lock, into another folder. Raises ValueError while the run goes on."""
    with lock_folder(out):
        to.mkdir(exist_ok=True)
        for path in out.iterdir():
            if path.name != LOCK_NAME:
                shutil.move(path, to / path.name)


@contextmanager
def locked(prog: str, args: Namespace, is_writer: bool, broadcast: Callable[[bool], bool]) -> Iterator[None]:
    """Within the block no other run writes to `args.out`. A collective: every process of the run calls it, and all exit
    if another run does; the writer says why. broadcast: returns in every process what the writer passes."""
    file, error = None, ""
    if is_writer:
        try:
            file = lock_folder(args.out)
            check_new(args.out, args.resume)  # another run may have begun and ended since the flags were read
        except ValueError as refusal:
            error = str(refusal)
    try:
        if broadcast(bool(error)):
            sys.exit(f"{prog}: error: {error}" if error else 1)
        yield
    finally:
        if file:
            file.close()
