"""Two processes of deaths.py, and the end of the one that survives. No process is left, whatever happens."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from .deaths import LIMIT, RANKS, VICTIM

ROOT = Path(__file__).parents[3]
READY, HANG = 240, 120
"""Seconds to the second step, with the compilation of all kernels, and from the death to an end that counts as none."""


TRACES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Where torch writes its record of collectives when one takes too long; the name depends on its version."""
PAUSE = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000"}
"""For that record torch waits four times this long before it ends a process: 20 s, by default 60."""


class Ended(NamedTuple):
    """code: of the survivor, None if it had no end. seconds: from the death to its end. output: of the survivor, and
    `told`: of the victim."""

    code: int | None
    seconds: float
    output: str
    told: str


def run(exchange: str, phase: int, kind: str, environment: dict[str, str] | None = None) -> Ended:
    """The end of the other rank when one gets the signal `kind` in a phase."""
    with _started(exchange, [str(phase), kind], environment) as ranks:
        died = ranks.time_of_death()
        code = ranks.end_of(1 - VICTIM, HANG)
        seconds = time.monotonic() - died
        return Ended(code, seconds, ranks.output(1 - VICTIM), ranks.output(VICTIM))


def run_alive(exchange: str, environment: dict[str, str] | None = None) -> list[Ended]:
    """The ends of both ranks when none dies."""
    start = time.monotonic()
    with _started(exchange, [], environment) as ranks:
        codes = [ranks.end_of(rank, READY) for rank in range(RANKS)]
        seconds = time.monotonic() - start
        return [Ended(codes[i], seconds, ranks.output(i), ranks.output(1 - i)) for i in range(RANKS)]


class _started:
    """The processes, in a `with` block. The store is in this process: it outlives each of them."""

    def __init__(self, exchange: str, death: list[str], environment: dict[str, str] | None) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        self.files = [Path(self.folder.name, str(rank)) for rank in range(RANKS)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, file in enumerate(self.files):
            command = [sys.executable, "-m", "tests.gpu.exchange.deaths", str(rank), str(self.store.port), exchange]
            with file.open("wb") as out:
                traces = dict.fromkeys(TRACES, f"{self.folder.name}/trace")
                env = {**os.environ, **traces, **PAUSE, "TMPDIR": self.folder.name, **(environment or {})}
                process = subprocess.Popen([*command, *death], cwd=ROOT, env=env, stdout=out, stderr=out)
            self.processes.append(process)

    def __enter__(self) -> "_started":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()  # a stopped one too
        for process in self.processes:
            process.wait()
        self.folder.cleanup()

    def output(self, rank: int) -> str:
        return self.files[rank].read_text(errors="replace")

    def time_of_death(self) -> float:
        """By `time.monotonic`, which is one clock for all processes of a host."""
        end = time.monotonic() + READY
        while time.monotonic() < end:
            if found := re.search(r"^dies at ([\d.]+)$", self.output(VICTIM), re.MULTILINE):
                return float(found[1])
            if any(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.05)
        told = "".join(f"\n--- rank {rank}\n{self.output(rank)[-6000:]}" for rank in range(RANKS))
        raise AssertionError(f"no rank died within {READY} s, or one ended before:{told}")

    def end_of(self, rank: int, seconds: float) -> int | None:
        try:
            return self.processes[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            self.processes[rank].send_signal(signal.SIGUSR1)  # its output has the stacks of its threads
            time.sleep(1)
            return None


def list_deaths(phases: dict[str, list[str]], kinds: list[str]) -> dict[str, tuple[str, int, str]]:
    """By names: an exchange, a phase and a kind of death, but for the measure."""
    return {
        f"{exchange}, {i} {phase}, {kind}": (exchange, i, kind)
        for exchange, of in phases.items()
        for i, phase in enumerate(of)
        for kind in kinds
        if exchange != "all-reduce"
    }


def require_end(found: Ended, of_all_reduce: float, messages: str) -> None:
    """The survivor has ended with an error that is one of `messages`, within LIMIT and the time of an all-reduce.
    of_all_reduce: seconds that torch's own all-reduce needs to end after such a death."""
    tail = f"\n--- the survivor\n{found.output[-6000:]}\n--- the victim\n{found.told[-2000:]}"
    assert found.code is not None, f"no end within {HANG} s{tail}"
    assert found.code != 0, f"the survivor ended without an error{tail}"
    assert re.search(messages, found.output), f"no message of {messages!r}{tail}"
    assert found.seconds < LIMIT + of_all_reduce, f"{found.seconds:.1f} s, all-reduce {of_all_reduce:.1f} s{tail}"
