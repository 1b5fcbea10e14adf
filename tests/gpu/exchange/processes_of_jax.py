"""JAX's exchange in several processes of one host, run by test_processes.py:

    python -m tests.gpu.exchange.processes_of_jax PART PROCESSES

starts the processes, a GPU each. PART: a name of PARTS. On one GPU two processes share it: NCCL refuses that, so
all-gathers and the bytes of `gather_bytes` go other ways there, and the kernels and the mapped memory are the same.
"""

import faulthandler
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from mxep.jax_frontend.exchange import device_exchange, peer_exchange, processes
from mxep.jax_frontend.exchange.peer_memory import PeerMemory
from mxep.jax_frontend.exchange.peer_rows import Peers

from . import peers_of_jax

LIMIT, CALLS = timedelta(seconds=5), itertools.count()
HANG = 120
"""Seconds after which a process prints what its threads do. A run takes 30."""


def without_last_rank(memory: PeerMemory, end: Callable[[], None]) -> None:
    """The last process ends, or stops, between two calls; the others end at the limit, with a sentence."""
    rank = jax.process_index()
    peers_of_jax.gathers(memory, 96)
    if rank == jax.process_count() - 1:
        end()
    try:
        peers_of_jax.gathers(memory, 96)
    except jax.errors.JaxRuntimeError as error:
        print(f"rank {rank} ended: {str(error)[:200]}", flush=True)
        os._exit(3)


WITHOUT_LAST: dict[str, Callable[[], None]] = {
    "dead_rank": lambda: os._exit(0),
    "stopped_rank": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
PARTS: dict[str, Callable[[PeerMemory], None]] = peers_of_jax.PARTS | {
    part: partial(without_last_rank, end=end) for part, end in WITHOUT_LAST.items()
}


def gather_over_store(mine: bytes) -> list[bytes]:
    """`gather_bytes` through the store of jax.distributed, which needs no GPU."""
    from jax._src.distributed import global_state

    store: Any = global_state.client
    key = f"bytes/{next(CALLS)}"
    store.key_value_set_bytes(f"{key}/{jax.process_index()}", mine)
    return [store.blocking_key_value_get_bytes(f"{key}/{i}", 60_000) for i in range(jax.process_count())]


def share_one_gpu() -> None:
    """Without NCCL: the rows of all ranks are read through peer memory."""
    memories = []
    make = peers_of_jax.memory_of

    def memory_of(ranks: int, **options: Any) -> PeerMemory:
        memories.append(make(ranks, **options))
        return memories[-1]

    def all_ranks(x: jax.Array, across: Any) -> jax.Array:
        memory, rows = memories[-1], x.reshape(x.shape[0], -1)
        number = jnp.arange(x.shape[0] * memory.ranks, dtype=jnp.int32)
        if x.dtype == jnp.uint8:  # the op takes bf16 and fp32, and copies their bits
            rows = lax.bitcast_convert_type(rows.reshape(*rows.shape[:1], -1, 2), jnp.bfloat16)
        elif x.dtype == jnp.int32:
            rows = lax.bitcast_convert_type(rows, jnp.float32)
        (found,) = Peers(memory).read("permute_rows", rows, number)
        return lax.bitcast_convert_type(found, x.dtype).reshape(-1, *x.shape[1:])

    peers_of_jax.memory_of = memory_of
    processes.gather_bytes = gather_over_store
    for module in (peer_exchange, device_exchange):
        module.all_ranks = all_ranks  # type: ignore[attr-defined]


def run_rank(part: str, count: int, rank: int, port: str, one_gpu: bool) -> None:
    faulthandler.dump_traceback_later(HANG)
    device = 0 if one_gpu else rank
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, local_device_ids=[device])
    if one_gpu:
        share_one_gpu()
    PARTS[part](peers_of_jax.memory_of(count, timeout=LIMIT))
    print(f"ran {part} as rank {rank} of {count}", flush=True)


def start(part: str, count: int) -> tuple[int, str]:
    """The number of processes that failed, and the output of all; none is left. Raises AssertionError if one hangs."""
    gpus = torch.cuda.device_count()  # without a context
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_memory = {"PREALLOCATE": "true", "MEM_FRACTION": str(0.2 / count) if gpus < count else "0.2"}
    environment = os.environ | {f"XLA_PYTHON_CLIENT_{name}": value for name, value in of_memory.items()}
    command = [sys.executable, "-m", __spec__.name, part, str(count)]
    started, failed, end = [], None, time.monotonic() + HANG + 20
    with tempfile.TemporaryFile("w+") as out:
        try:
            for rank in range(count):
                arguments = str(rank), str(port), str(int(gpus < count))
                started.append(subprocess.Popen([*command, *arguments], env=environment, stdout=out, stderr=out))
            waited = started[:-1] if part in WITHOUT_LAST else started  # the last one does not end by itself
            failed = sum(process.wait(end - time.monotonic()) != 0 for process in waited)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in started:
                process.kill()
                process.wait()
            out.seek(0)
            text = out.read()
    assert failed is not None, f"no end within {HANG + 20} s: {text[-6000:]}"
    return failed, text


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _failed, _text = start(sys.argv[1], int(sys.argv[2]))
        print(_text)
        sys.exit(_failed)
    _part, _count, _rank, _port, _one = sys.argv[1:]
    run_rank(_part, int(_count), int(_rank), _port, _one == "1")
