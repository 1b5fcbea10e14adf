"""File descriptors between processes, which carry the memory of GPUs; tests/gpu/exchange/test_processes.py maps it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from mxep.jax_frontend.exchange import processes

from .descriptors import PROCESSES

ROOT = Path(__file__).parents[3]


def test_each_process_gets_the_descriptors_of_all() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.jax_frontend.exchange.descriptors", str(port)]
    started = [
        subprocess.Popen(
            [*command, str(i)], cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(PROCESSES)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    want = [f"{10 * process + i} has {process} {i}" for process in range(PROCESSES) for i in range(process + 1)]
    for process, text in zip(started, texts, strict=True):
        assert process.returncode == 0, text[-4000:]
        assert [line for line in text.splitlines() if " has " in line] == want, text[-4000:]


@pytest.mark.parametrize("alone", [True, False], ids=["nobody connects", "nobody listens"])
def test_a_process_that_no_socket_connects(alone: bool) -> None:
    """As in another container: its name is known, and nobody is there."""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as other:
        server.bind(b"\0mxep-test-here")
        server.listen(2)
        if alone:
            other.bind(b"\0mxep-test-other")
            other.listen(2)
        assert jax.process_index() == 0
        names = [b"\0mxep-test-here", b"\0mxep-test-other"]
        with pytest.raises(RuntimeError, match=r"PeerMemory: mesh: got no socket between its processes: .*container"):
            processes._send_and_receive("PeerMemory", server, names, [], [0, 1], limit_ms=200)
