"""Ranks that share their imports: a script forks them once it has imported everything, and before any thread runs."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]


def fork_ranks(ranks: int) -> int:
    """Return in every rank with its number. The calling process waits for them, and exits with 1 if one has failed."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            return rank
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    os._exit(any(failed))


def run_script(script: Path, *arguments: object) -> tuple[int, str]:
    """Run a script of `tests` that forks ranks. Returns its status and its stderr."""
    how = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True, "start_new_session": True}
    module = ".".join(script.relative_to(ROOT).with_suffix("").parts)
    process = subprocess.Popen([sys.executable, "-m", module, *map(str, arguments)], cwd=ROOT, **how)
    try:
        errors = process.communicate(timeout=300)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, errors


def run_ranks(script: Path, ranks: int, out: Path) -> tuple[list[list[str]], str]:
    """Run `script RANKS PORT OUT`, PORT of a store. Returns the lines of OUT/rank0, OUT/rank1 ... and its stderr."""
    # Ranks poll a store on disk: with as many groups as theirs that is a sixth of the time.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _, errors = run_script(script, ranks, store.port, out)
    files = [out / f"rank{rank}" for rank in range(ranks)]
    return [file.read_text().splitlines() if file.exists() else [] for file in files], errors
