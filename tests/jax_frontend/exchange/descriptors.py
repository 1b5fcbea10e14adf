"""A process that gives the others its file descriptors, and prints what it reads from theirs; run by test_processes.py.

python -m tests.jax_frontend.exchange.descriptors PORT PROCESS
"""

import os
import sys

import jax
from mxep.jax_frontend.exchange import processes

PROCESSES, LIMIT_MS = 3, 60_000


def main(port: str, process: str) -> None:
    here = int(process)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, here)
    told, mine = [], []
    for i in range(here + 1):  # as many devices as its number, and one
        told.append(processes.Told(here, 7, 10 * here + i, i, 2**40 + i, 4096))
        mine.append(os.memfd_create("memory"))
        os.write(mine[-1], f"{here} {i}".encode())
    of_all, descriptors = processes._exchange("test", told, mine, LIMIT_MS)
    for one, descriptor in zip(of_all, descriptors, strict=True):
        assert one == (one.process, 7, one.index, one.index % 10, 2**40 + one.index % 10, 4096)
        print(f"{one.index} has {os.pread(descriptor, 16, 0).decode()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
