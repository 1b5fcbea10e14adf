"""Ranks: real processes that run checks by name. A test runs one check; its failure shows what each rank raised.

    pytest --module, number--> template: imports the module --fork--> rank 0, 1 ...
       '------------------- name of a check, result or traceback -------------------'

A module of checks has `checks(ranks)`: name -> function without arguments, which every rank calls; it may have
`begin(rank)`, which every rank calls once, in its process group. One template, without threads, imports the modules for
all groups of a session. After a failure the processes are replaced: none of them runs another check.

    @pytest.fixture(scope="module")
    def ranks(start_ranks: StartRanks) -> Ranks:
        return start_ranks(ep_ranks, 4)

    @pytest.mark.parametrize("check", ep_ranks.checks(4))
    def test_over_gloo(ranks: Ranks, check: str) -> None:
        ranks.run(check)
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest

from .processes import Group

ROOT = Path(__file__).parents[2]
GRACE = 5.0
"""Seconds in which the other ranks of a check that failed on one may still answer; most wait for that one."""


class Template:
    """The process that imports modules of checks and forks their ranks."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.control, theirs = socket.socketpair()
        self.log = Path(self.folder.name, "log")
        with self.log.open("w") as log, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.ranks.processes", str(theirs.fileno())],
                cwd=ROOT, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def fork(self, group: Group) -> list[Connection]:
        """A connection to each rank; it is at its end if the rank could not start."""
        ours, theirs = zip(*(Pipe() for _ in range(group.ranks)), strict=True)
        with suppress(BrokenPipeError):
            socket.send_fds(self.control, [json.dumps(group).encode()], [link.fileno() for link in theirs])
        for link in theirs:
            link.close()
        return list(ours)

    def end(self) -> None:
        """Its ranks may still write what they measured: lines that they ran, for `make coverage`."""
        self.control.close()
        try:
            self.process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.folder.cleanup()


class Ranks:
    """The ranks of one module of checks, started by the first check and replaced after a failure."""

    def __init__(
        self, template: Template, module: ModuleType, ranks: int, backend: str | None, limit: float, check_limit: float
    ) -> None:
        self._template, self._check_limit = template, check_limit
        self._group = Group(module.__name__, ranks, backend, limit, 0, template.folder.name)
        self._links: list[Connection] = []
        self._pids: dict[int, int] = {}
        self._store: Any = None

    def run(self, check: str, lost: Collection[int] = ()) -> list[Any]:
        """Run the check on every rank. Returns their results.

        lost: ranks that die or hang in this check; their results are None, and the next check has new processes.
        """
        log = self._template.log.stat().st_size
        try:
            found = {} if self._links else self._start()
            if not _failed(found):
                for link in self._links:
                    with suppress(ConnectionError):
                        link.send(check)
                found = self._answers(lost)
        except BaseException:  # the answers to this check are still to come
            self.stop(kill=True)
            raise
        if lost or _failed(found):
            self.stop(kill=True)
        if _failed(found):
            told = "".join(
                f"\n--- rank {rank}: {answer if isinstance(answer, str) else 'passed'}"
                for rank, answer in sorted(found.items())
            )
            with self._template.log.open(errors="replace") as file:
                file.seek(log)
                printed = file.read()[-8000:]
            pytest.fail(f"{check}{told}\n--- printed\n{printed}", pytrace=False)
        return [None if rank in lost else found[rank][0] for rank in range(self._group.ranks)]

    def stop(self, kill: bool = False) -> None:
        """End the processes: each ends itself when it has nothing more to run."""
        for pid in self._pids.values() if kill else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for link in self._links:
            link.close()
        self._links, self._pids, self._store = [], {}, None

    def _start(self) -> dict[int, Any]:
        port = 0
        if self._group.backend is not None:
            import torch.distributed as dist  # torch is not everywhere

            # Ranks poll a store on disk: with as many groups as theirs that is a sixth of the time.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
            port = self._store.port
        self._links = self._template.fork(self._group._replace(port=port))
        for rank, link in enumerate(self._links):
            with suppress(EOFError):
                self._pids[rank] = link.recv()
        return self._answers()

    def _answers(self, lost: Collection[int] = ()) -> dict[int, Any]:
        """By rank: (result,), or the text of what went wrong."""
        waiting = {link: rank for rank, link in enumerate(self._links) if rank not in lost}
        found: dict[int, Any] = {}
        end = time.monotonic() + self._check_limit
        while waiting and (ready := wait(list(waiting), max(end - time.monotonic(), 0))):
            for link in ready:
                rank = waiting.pop(link)  # type: ignore[call-overload]
                try:
                    found[rank] = link.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    found[rank] = "its process has ended"
                if isinstance(found[rank], str):
                    end = min(end, time.monotonic() + GRACE)
        for rank in lost:
            with suppress(EOFError, ConnectionError):
                if self._links[rank].poll(1) and self._links[rank].recv():
                    found[rank] = "ran to the end, which it should not"
        stuck = sorted(waiting.values())
        return found | dict(zip(stuck, self._stacks(stuck), strict=True))

    def _stacks(self, ranks: list[int]) -> list[str]:
        """Where the threads of these ranks are, by faulthandler."""
        files = [Path(self._group.stacks, f"stacks-{self._pids[rank]}") for rank in ranks]
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not all(file.exists() and file.stat().st_size for file in files):
            time.sleep(0.05)
        time.sleep(0.1 * bool(ranks))  # until the last line is written
        return [f"still runs; its threads:\n{file.read_text() if file.exists() else ''}" for file in files]


def _failed(found: dict[int, Any]) -> bool:
    return any(isinstance(answer, str) for answer in found.values())


class StartRanks(Protocol):
    def __call__(
        self, module: ModuleType, ranks: int, *, backend: str | None = ..., limit: float = ..., check_limit: float = ...
    ) -> Ranks: ...


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    made = Template()
    yield made
    made.end()


@pytest.fixture(scope="module")
def start_ranks(template: Template) -> Iterator[StartRanks]:
    """`start_ranks(module, ranks)`: the ranks of a module of checks, until the end of this file.

    backend: of torch.distributed; None: no process group. "nccl" gives each rank a GPU. limit: of the process group,
    and check_limit: of a check, in seconds.
    """
    started: list[Ranks] = []

    def start(
        module: ModuleType, ranks: int, *, backend: str | None = "gloo", limit: float = 120, check_limit: float = 110
    ) -> Ranks:
        started.append(Ranks(template, module, ranks, backend, limit, check_limit))
        return started[-1]

    yield start
    for ranks in started:
        ranks.stop()


def with_slow(names: Iterable[str], slow: Sequence[str]) -> list[Any]:
    """The names for `parametrize`; some have the marker `slow`."""
    names = list(names)
    assert set(slow) <= set(names), set(slow) - set(names)
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
