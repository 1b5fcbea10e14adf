"""A process that dies or hangs ends the other processes of a JAX program, by JAX's coordination service. Devices of one
process have no such fault."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .die import HEARTBEAT, PROCESSES

ROOT = Path(__file__).parents[3]
SLACK = 60
"""Seconds from the last heartbeat to the end: 3 measured."""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["SIGKILL", "SIGSTOP"])
def test_the_other_process_ends_and_names_the_dead_one(ending: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.jax_frontend.exchange.die", str(port), str(i), ending],
            cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(PROCESSES)
    ]  # fmt: skip
    try:
        other = processes[0]
        assert other.stdout is not None
        assert any("five steps" in line for line in other.stdout)
        start = time.monotonic()
        told, _ = other.communicate(timeout=HEARTBEAT + SLACK)
        seconds = time.monotonic() - start
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert other.returncode
    assert seconds < HEARTBEAT + SLACK
    assert "The following tasks are unhealthy (stopped sending heartbeats):\n1\n" in told, told[-4000:]
