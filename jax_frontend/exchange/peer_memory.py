"""Memory of the GPUs of one host, of one process or of several, that kernels of all of them read and write.

    a program    kernels | meet | kernels that use memory of all ranks | meet | kernels        peer_rows.py calls it

`meet` is a kernel that signals the other ranks and waits for them (core_kernels/peer/group/group.h). It tells them
where this rank's arrays are, in memory that XLA allocated. A process reads arrays of its own GPUs at their addresses.
It maps the memory of the other processes when a PeerMemory is made (processes.py).
"""

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ... import cpp_bindings
from ...core_kernels.launch import fail
from ..ops import device
from ..ops.checks import check_type
from ..ops.mesh import Axes, axis_names
from .processes import NO_KERNELS, Shared, find_obstacle, share_memory

OP = "PeerMemory"
TIMEOUT = timedelta(minutes=10)
ONE_RANK = "one rank"
LOG = logging.getLogger(__name__)
_COUNT = itertools.count()


class PeerMemory:
    """The memory of the GPUs along axes of a mesh, for exchanges that kernels of all of them drive.

    All processes of the mesh make it at the same time, before they use it: each maps the memory of the others. One
    serves all layers on the mesh. `MoEConfig(transport=...)` and `dispatch(transport=...)` take it, and `gather_rows`
    and the like as `across=`. On CPUs the rows of all ranks are gathered, with the same bytes.

    The ranks meet in kernels, without the host. A rank that waits for `timeout` prints which rank did not come, and
    ends with an error of CUDA: so do all others when a process dies.

    Several processes need GPUs of one host, XLA's default allocator, which shares its memory, and memory that is
    allocated in advance (XLA_PYTHON_CLIENT_PREALLOCATE=true, the default).

    Args:
        mesh: A `jax.sharding.Mesh` of all devices of all processes, as `jax.make_mesh` makes it.
        axis_name: The mesh axis, or axes, along which the ranks are: the `axis_name` of the layer.
        timeout: How long a rank waits for the others.

    Raises:
        TypeError: For arguments of another type.
        ValueError: For axes that the mesh does not have, ranks on several hosts, too many ranks.
        NotImplementedError: For a build without CUDA kernels for the GPUs.
        RuntimeError: Where GPUs cannot read each other's memory, or processes cannot share it.

    Example:
        >>> mesh = jax.make_mesh((1,), ("expert",))
        >>> PeerMemory(mesh, "expert")
        PeerMemory(axis_name='expert', ranks=1)
    """

    def __init__(self, mesh: Mesh, axis_name: Axes, *, timeout: timedelta = TIMEOUT) -> None:
        names, limit_ms = _check(mesh, axis_name, timeout)
        self.mesh, self.axis_name = mesh, axis_name
        self.groups = _groups_of(mesh, names)
        self.number = jax.process_index() << 32 | next(_COUNT)
        self._group: Any = None
        if _platform(mesh) != "cpu" and self.ranks > 1:
            if reason := _find_obstacle(mesh, self.ranks):
                error = NotImplementedError if reason == NO_KERNELS else ValueError
                fail(error, OP, "mesh", reason, "allowed: GPUs of one host, in a build with nvcc; or transport=None")
            self._connect(limit_ms)

    @classmethod
    def choose(cls, mesh: Mesh, axis_name: Axes, *, timeout: timedelta = TIMEOUT) -> "PeerMemory | None":
        """Make a `PeerMemory` where it works, for programs that run on one GPU host, on several and on CPUs.

        All processes of the mesh call it, and get the same answer. A sentence in the log of `mxep` says which exchange
        runs: on GPUs without `PeerMemory` a warning.

        Args:
            mesh: A `jax.sharding.Mesh` of all devices of all processes.
            axis_name: The mesh axis, or axes, along which the ranks are.
            timeout: How long a rank waits for the others.

        Returns:
            A `PeerMemory` for two or more ranks on GPUs of one host; else None, the all-to-all of XLA.

        Raises:
            TypeError: For arguments of another type.
            ValueError: For axes that the mesh does not have.
            RuntimeError: Where GPUs cannot read each other's memory, or processes cannot share it.

        Example:
            >>> mesh = jax.make_mesh((1,), ("expert",))
            >>> config = moe.MoEConfig(64, 64, 4, RouterConfig(2), transport=PeerMemory.choose(mesh, "expert"))
            >>> config.transport is None
            True
        """
        names, _ = _check(mesh, axis_name, timeout)
        if reason := _find_obstacle(mesh, _groups_of(mesh, names).shape[1]):
            level = logging.INFO if _platform(mesh) == "cpu" or reason == ONE_RANK else logging.WARNING
            LOG.log(level, "PeerMemory.choose: %s: experts get their rows by all-to-all", reason)
            return None
        memory = cls(mesh, axis_name, timeout=timeout)
        LOG.info("PeerMemory.choose: experts get their rows through PeerMemory of %d GPUs", memory.ranks)
        return memory

    def __repr__(self) -> str:
        return f"PeerMemory(axis_name={self.axis_name!r}, ranks={self.ranks})"

    def __deepcopy__(self, memo: Any) -> "PeerMemory":
        return self  # a configuration that is copied uses the same memory

    @property
    def ranks(self) -> int:
        return self.groups.shape[1]

    def check_axes(self, op: str, axis_name: Axes) -> None:
        """Raise ValueError unless the ranks are along these axes. An axis of one rank makes no difference."""
        given, own = (
            tuple(axis for axis in axis_names(op, "axis_name", axes) if self.mesh.shape.get(axis) != 1)
            for axes in (axis_name, self.axis_name)
        )
        if given != own:
            fail(ValueError, op, "transport", self, f"allowed: a PeerMemory along axis_name={axis_name!r}")

    def check_here(self, op: str) -> None:
        """Raise unless the call is in a program on this mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.axis_names != self.mesh.axis_names or mesh.axis_sizes != self.mesh.axis_sizes:
            got = f"of a mesh with axes {dict(self.mesh.shape)}"
            fail(ValueError, op, OP, got, f"allowed: one of this mesh, with axes {dict(mesh.shape)}")

    def _connect(self, limit_ms: int) -> None:
        pads = _make_signal_pads(self.mesh)
        shared = share_memory(OP, self.mesh, pads, self.number, limit_ms)
        self.number, members = shared.number, _members(self.groups, shared)
        self._group = cpp_bindings.PeerGroup(shared.number, members, limit_ms, _Held(pads, shared))
        self._group.test()


def _check(mesh: Mesh, axis_name: Axes, timeout: timedelta) -> tuple[Sequence[str], int]:
    """The names of the axes, and the limit in milliseconds."""
    check_type(OP, "mesh", mesh, Mesh)
    check_type(OP, "timeout", timeout, timedelta)
    limit_ms = timeout // timedelta(milliseconds=1)
    if limit_ms < 1:
        fail(ValueError, OP, "timeout", timeout, "allowed: a millisecond or more")
    names = axis_names(OP, "axis_name", axis_name)
    if not names or not set(names) <= set(mesh.axis_names):
        fail(ValueError, OP, "axis_name", repr(axis_name), f"allowed: axes of the mesh, {mesh.axis_names}")
    return names, limit_ms


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def _find_obstacle(mesh: Mesh, ranks: int) -> str:
    """Why the ranks of this mesh have no PeerMemory, "" if they have. A collective of several processes."""
    if _platform(mesh) == "cpu":
        return "devices of a CPU"
    if ranks == 1:
        return ONE_RANK
    if ranks > cpp_bindings.MOST_PEERS:
        return f"{ranks} ranks, more than {cpp_bindings.MOST_PEERS}"
    return find_obstacle(mesh, device.compute_capability() in cpp_bindings.cuda_archs)


@dataclasses.dataclass(frozen=True)
class _Held:
    """What kernels of the group use, until it is gone."""

    pads: jax.Array
    shared: Shared


class _Member(NamedTuple):
    """As `PeerGroup` takes them."""

    device: int
    rank: int
    pads: list[int]
    shifts: list[int]
    ordinals: list[int]
    memory: tuple[int, int]


def _members(groups: np.ndarray, shared: Shared) -> list[_Member]:
    """Of this process."""
    found = []
    for group in groups.tolist():
        of = [shared.devices[i] for i in group]
        for rank, here in enumerate(of):
            if here.ordinal >= 0:
                pads, shifts, ordinals = [d.pad for d in of], [d.shift for d in of], [d.ordinal for d in of]
                found.append(_Member(here.ordinal, rank, pads, shifts, ordinals, here.memory))
    return found


def _groups_of(mesh: Mesh, names: Sequence[str]) -> np.ndarray:
    """(groups, ranks): the numbers of the devices of the mesh that differ along the axes alone."""
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    inside = [mesh.axis_names.index(name) for name in names]
    outside = [i for i in range(numbers.ndim) if i not in inside]
    ranks = int(np.prod([mesh.devices.shape[i] for i in inside]))
    return numbers.transpose(outside + inside).reshape(-1, ranks)


def _make_signal_pads(mesh: Mesh) -> jax.Array:
    """(devices, SIGNAL_PAD_BYTES) zeros, a row on each device, which kernels write."""
    shape, sharding = (mesh.size, cpp_bindings.SIGNAL_PAD_BYTES), NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    zeros = np.zeros((1, shape[1]), np.uint8)
    return jax.make_array_from_callback(shape, sharding, lambda _: zeros).block_until_ready()
