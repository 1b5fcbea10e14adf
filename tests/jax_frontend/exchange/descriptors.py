"""A process that finds what keeps it from sharing memory with the others, gives them its file descriptors, and prints
what it reads from theirs; run by test_processes.py.

python -m tests.jax_frontend.exchange.descriptors PORT PROCESS
"""

import os
import sys
import tempfile
import uuid
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from mxep.jax_frontend.exchange import processes

PROCESSES, LIMIT_MS = 3, 60_000


def main(port: str, process: str) -> None:
    here = int(process)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, here)
    find_obstacles(here)
    told, mine = [], []
    for i in range(here + 1):  # as many devices as its number, and one
        told.append(processes.Told(here, 7, 10 * here + i, i, 2**40 + i, 4096))
        mine.append(os.memfd_create("memory"))
        os.write(mine[-1], f"{here} {i}".encode())
    of_all, descriptors = processes._exchange("test", told, mine, LIMIT_MS)
    for one, descriptor in zip(of_all, descriptors, strict=True):
        assert one == (one.process, 7, one.index, one.index % 10, 2**40 + one.index % 10, 4096)
        print(f"{one.index} has {os.pread(descriptor, 16, 0).decode()}", flush=True)


def find_obstacles(here: int) -> None:
    """Of meshes of all processes, of this one alone, of two of three; where the last process has no kernels, and where
    it is on another host."""

    def of(devices: list[jax.Device], has_kernels: bool = True) -> str:
        return processes.find_obstacle(Mesh(np.array(devices), ("expert",)), has_kernels)

    of_all, local, last = jax.devices(), jax.local_devices(), here == PROCESSES - 1
    assert (of(of_all), of(local), of(of_all[:2])) == ("", "", "devices of 2 of 3 processes")
    assert (of(of_all, not last), of(local, False)) == (processes.NO_KERNELS, processes.NO_KERNELS)
    with tempfile.NamedTemporaryFile("w") as boot:
        boot.write(str(uuid.UUID(int=last)))
        boot.flush()
        processes._BOOT = Path(boot.name)
        assert of(of_all) == "processes on 2 hosts"


if __name__ == "__main__":
    main(*sys.argv[1:])
