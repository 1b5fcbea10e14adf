"""The memory of the GPUs of other processes of a host, which this process maps.

    region of each GPU --file descriptor, over a socket--> every other process --map--> addresses there

XLA allocates the memory of a GPU in one region. An address of another process is this process's address of its region
and the same offset: a shift.
"""

import os
import socket
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from ... import cpp_bindings
from ...core_kernels.launch import fail

NO_KERNELS = "no CUDA kernels in this build for this GPU"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Device(NamedTuple):
    """A device of a mesh. ordinal: the number of its GPU in this process, or -1. pad: the address of its signal pad,
    here. shift: added to an address of its process. memory: first address and bytes of its region, of a GPU of this
    process; no bytes where all processes are this one."""

    ordinal: int
    pad: int
    shift: int
    memory: tuple[int, int]


class Shared(NamedTuple):
    """number: the same in all processes. devices: of the mesh, in its order. regions: keep the memory mapped."""

    number: int
    devices: list[Device]
    regions: list[Any]


class Told(NamedTuple):
    """Of a device of a process, for the other processes: int64 numbers. index: on the mesh."""

    process: int
    number: int
    index: int
    pad: int
    base: int
    nbytes: int


def find_obstacle(mesh: Mesh, has_kernels: bool) -> str:
    """Why the processes of a mesh cannot share memory, "" if they can. With several processes a collective of them."""
    processes = {d.process_index for d in mesh.devices.flat}
    if processes == {jax.process_index()}:
        return "" if has_kernels else NO_KERNELS
    if len(processes) < jax.process_count():
        return f"devices of {len(processes)} of {jax.process_count()} processes"
    of_all = gather_bytes(uuid.UUID(_BOOT.read_text().strip()).bytes + bytes([has_kernels]))
    hosts = len({told[:-1] for told in of_all})
    if hosts > 1:
        return f"processes on {hosts} hosts"
    return "" if all(told[-1] for told in of_all) else NO_KERNELS


def share_memory(op: str, mesh: Mesh, pads: jax.Array, number: int, limit_ms: int) -> Shared:
    """The devices of a mesh without an obstacle; a collective of several processes. pads: a row per device.

    Raises:
        RuntimeError: For processes that no socket connects, such as processes in different containers.
    """
    addresses = {s.index[0].start or 0: s.data.unsafe_buffer_pointer() for s in pads.addressable_shards}
    ordinals = {i: _ordinal(mesh.devices.flat[i]) for i in addresses}
    processes = {d.process_index for d in mesh.devices.flat}
    if processes == {jax.process_index()}:
        return Shared(number, [Device(ordinals[i], addresses[i], 0, (0, 0)) for i in range(mesh.size)], [])
    found = {i: cpp_bindings.peer_region(address) for i, address in addresses.items()}
    here = jax.process_index()
    told = [Told(here, number, i, addresses[i], base, nbytes) for i, (base, nbytes, _) in found.items()]
    try:
        of_all, descriptors = _exchange(op, told, [descriptor for *_, descriptor in found.values()], limit_ms)
        devices, regions = {}, []
        for one, descriptor in zip(of_all, descriptors, strict=True):
            if one.process == here:
                devices[one.index] = Device(ordinals[one.index], one.pad, 0, (one.base, one.nbytes))
                continue
            regions.append(cpp_bindings.MappedRegion(descriptor, one.nbytes, sorted(set(ordinals.values()))))
            shift = regions[-1].address - one.base
            devices[one.index] = Device(-1, one.pad + shift, shift, (0, 0))
    finally:
        for *_, descriptor in found.values():
            os.close(descriptor)
    for one, descriptor in zip(of_all, descriptors, strict=True):
        if one.process != here:
            os.close(descriptor)
    return Shared(of_all[0].number, [devices[i] for i in range(mesh.size)], regions)


def _ordinal(device: Any) -> int:
    ordinal = device.local_hardware_id
    assert ordinal is not None
    return ordinal


def gather_bytes(mine: bytes) -> list[bytes]:
    """The bytes of all processes, of one length."""
    return [row.tobytes() for row in process_allgather(np.frombuffer(mine, np.uint8))]


def _exchange(op: str, told: list[Told], descriptors: list[int], limit_ms: int) -> tuple[list[Told], list[int]]:
    """`Told` of all devices, by process, and a descriptor of each; the own ones are `descriptors`."""
    name = uuid.uuid4().bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(b"\0mxep-" + name.hex().encode())  # no file: the name ends with the socket
        server.listen(jax.process_count())
        # All processes listen when one knows the names.
        heads = gather_bytes(name + len(told).to_bytes(4, "little"))
        most = max(int.from_bytes(head[16:], "little") for head in heads)
        rows = np.full((most, len(Told._fields)), -1, np.int64)
        rows[: len(told)] = np.array(told)
        tables = [np.frombuffer(raw, np.int64).reshape(rows.shape) for raw in gather_bytes(rows.tobytes())]
        of_process = [[Told(*map(int, row)) for row in table if row[0] >= 0] for table in tables]
        names = [b"\0mxep-" + head[:16].hex().encode() for head in heads]
        found = _send_and_receive(op, server, names, descriptors, [len(table) for table in of_process], limit_ms)
    return [one for table in of_process for one in table], [d for part in found for d in part]


def _send_and_receive(
    op: str, server: socket.socket, names: list[bytes], mine: list[int], counts: list[int], limit_ms: int
) -> list[list[int]]:
    """The descriptors of each process. Connections wait in the queue of their server until it accepts them."""
    here, found = jax.process_index(), []
    server.settimeout(limit_ms / 1000)
    try:
        peers = {process: _connect(name, limit_ms) for process, name in enumerate(names) if process != here}
        for _ in peers:
            connection, _ = server.accept()
            with connection:
                socket.send_fds(connection, [b"mxep"], mine)
        for process, count in enumerate(counts):
            if process == here:
                found.append(mine)
                continue
            with peers[process] as peer:
                _, descriptors, _, _ = socket.recv_fds(peer, 4, count)
            if len(descriptors) < count:
                raise OSError(f"{len(descriptors)} of {count} file descriptors came, `ulimit -n` may be too small")
            found.append(list(descriptors))
    except OSError as error:
        allowed = "allowed: processes of one host that share a network namespace, as in one container"
        fail(RuntimeError, op, "mesh", f"no socket between its processes: {error}", f"{allowed}; or transport=None")
    return found


def _connect(name: bytes, limit_ms: int) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(limit_ms / 1000)
    peer.connect(name)
    return peer
