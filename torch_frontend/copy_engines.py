"""Rows travel by the copy engines of the GPUs of one host: no multiprocessor takes part, not even to wait.

    box        memory of every rank that the others write into; one for operands, one for tokens
    arrived    flag in the receiver's memory, per sender and chunk: written behind the copies of the chunk
    turn       flag in the next sender's memory: a copy into a GPU starts when the copy before it has landed there
    free       flag in the senders' memory: the receiver has read what arrived

    copy stream       wait free, turn --> copy the rows of a chunk to one peer --> write arrived, turn
    current stream    wait arrived of all peers --> products --> ... --> write free

Two senders that write to one GPU at a time slow each other down: 212 GB/s, against 311 to 359 in turns, on four H200.
A flag holds the number of the leg that wrote it last, so nothing is ever reset. Waits and writes are the driver's
stream memory operations.
"""

import ctypes
import socket
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core_kernels.exchange import MOST_CHUNKS, Move, Step
from ..core_kernels.launch import fail
from ._torch_private import Shared, has_shared_memory, shared_memory
from .transport import Part, Where, between_ranks, copy_own, group_of

OP = "CopyEngines"
ALIGNMENT = 256
BOXES: tuple[Where, Where] = ("experts", "tokens")
GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ


class CopyEngines:
    """Copy engines between the GPUs of one host, a process each; the transport of all layers that share a group.

    group: a process group or its name, of at least two ranks; None is the default group. The memory that arriving rows
    need is allocated when a leg needs more than any before; all ranks then wait for each other. It holds the rows of
    the rank that receives most: on each GPU that many bytes, for the operands and for the tokens.

    The legs of two layers share this memory in the order of the calls, which must be one on all ranks. Layers that run
    on two streams at a time take a transport each. If a rank dies, the others' GPUs wait for its flags.

    Raises NotImplementedError without CUDA or torch's symmetric memory, ValueError for ranks on several hosts.
    """

    def __init__(self, group: "str | dist.ProcessGroup | None" = None) -> None:
        if not (torch.cuda.is_available() and has_shared_memory):
            got = "no CUDA" if has_shared_memory else "a torch without torch.distributed._symmetric_memory"
            fail(NotImplementedError, OP, "group", got, "allowed: GPUs of one host; Collectives work everywhere")
        self.group = group_of(OP, group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        hosts: list[Any] = [None] * self.ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=self.group)
        if len(set(hosts)) > 1:
            fail(ValueError, OP, "group", f"ranks on {sorted(set(hosts))}", "allowed: one host; else Collectives")
        self.driver = _Driver()
        self.flags = shared_memory(4 * len(BOXES) * self._flags_of_a_box(), self.group)
        self.flags.of_rank[self.rank].zero_()
        torch.cuda.synchronize()
        dist.barrier(self.group)
        self.boxes: dict[Where, Shared | None] = dict.fromkeys(BOXES)
        self.legs: dict[Where, int] = dict.fromkeys(BOXES, 0)

    def leg(
        self, where: Where, steps: Sequence[Step], rows: Sequence[int], parts: Sequence[Part], device: torch.device
    ) -> "_CopyLeg":
        # The same places on every rank: a part begins behind the longest one before it.
        row_bytes = [part.width * part.dtype.itemsize for part in parts]
        sizes = [-(-max(rows) * nbytes // ALIGNMENT) * ALIGNMENT for nbytes in row_bytes]
        self.legs[where] += 1
        places = list(accumulate(sizes, initial=0))
        box = self._box(where, max(places[-1], ALIGNMENT))
        views = [
            tuple(
                memory[at : at + n * nbytes].view(part.dtype).view(n, part.width)
                for at, nbytes, part in zip(places[:-1], row_bytes, parts, strict=True)
            )
            for memory, n in zip(box.of_rank, rows, strict=True)
        ]
        return _CopyLeg(self, where, self.legs[where], steps, views)

    def keep(self, received: Tensor) -> Tensor:
        return received.clone()

    def _box(self, where: Where, nbytes: int) -> Shared:
        """The box, of at least `nbytes` bytes. All ranks ask for equally many, so they grow it in the same leg."""
        box = self.boxes[where]
        if box is None or box.of_rank[0].shape[0] < nbytes:
            torch.cuda.synchronize()  # nobody reads the old box any more, and all that travelled to it has arrived
            dist.barrier(self.group)
            box = self.boxes[where] = shared_memory(nbytes, self.group)
        return box

    def _flags_of_a_box(self) -> int:
        return self.ranks * (1 + MOST_CHUNKS) + (self.ranks - 1) * MOST_CHUNKS

    def flag(self, owner: int, where: Where, index: int) -> int:
        """The address of a flag in the memory of rank `owner`."""
        at = BOXES.index(where) * self._flags_of_a_box() + index
        return self.flags.of_rank[owner].data_ptr() + 4 * at

    def free(self, owner: int, where: Where, by: int) -> int:
        return self.flag(owner, where, by)

    def arrived(self, owner: int, where: Where, sender: int, chunk: int) -> int:
        return self.flag(owner, where, self.ranks + sender * MOST_CHUNKS + chunk)

    def turn(self, owner: int, where: Where, step: int) -> int:
        return self.flag(owner, where, self.ranks * (1 + MOST_CHUNKS) + step)


class _CopyLeg:
    def __init__(
        self, of: CopyEngines, where: Where, number: int, steps: Sequence[Step], views: list[tuple[Tensor, ...]]
    ) -> None:
        self.where: Where = where
        self.of, self.number, self.steps, self.views = of, number, steps, views
        self.received = views[of.rank]
        self.way = 1 if where == "experts" else -1  # of the peers in a step, see `Step`

    def send(self, chunk: int, sources: Sequence[Tensor]) -> None:
        of, step = self.of, self.steps[chunk]
        of.driver.begin(sources)
        copy_own(step, of.rank, sources, self.received)
        moves = between_ranks(step.sends, of.rank)
        for k in range(1, of.ranks):
            peer = (of.rank + self.way * k) % of.ranks
            self._send_to(peer, chunk, k, [move for move in moves if move.peer == peer], sources)

    def _send_to(self, peer: int, chunk: int, k: int, moves: Sequence[Move], sources: Sequence[Tensor]) -> None:
        of, driver, turn = self.of, self.of.driver, chunk * (self.of.ranks - 1) + k - 1
        if chunk == 0:
            driver.wait_to_copy(of.free(of.rank, self.where, peer), self.number - 1)
        if turn:
            driver.wait_to_copy(of.turn(of.rank, self.where, turn), self.number)
        for source, destination in zip(sources, self.views[peer], strict=True):
            for move in moves:
                there = destination.narrow(0, move.destination, move.rows)
                driver.copy(there, source.narrow(0, move.source, move.rows))
        driver.write_behind_copies(of.arrived(peer, self.where, of.rank, chunk), self.number)
        if turn + 1 < len(self.steps) * (of.ranks - 1):
            after = (peer - self.way * ((turn + 1) % (of.ranks - 1) + 1)) % of.ranks
            driver.write_behind_copies(of.turn(after, self.where, turn + 1), self.number)

    def wait(self, chunk: int) -> None:
        of = self.of
        for peer in range(of.ranks):
            if peer != of.rank:
                of.driver.wait(of.arrived(of.rank, self.where, peer, chunk), self.number)

    def close(self) -> None:
        of = self.of
        for peer in range(of.ranks):
            if peer != of.rank:
                of.driver.write(of.free(peer, self.where, of.rank), self.number)


class _Driver:
    """Copies, and waits and writes of flags of 32 bits, on the stream of copies or on the current one."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._wait, self._write = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        for function in (self._wait, self._write):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self.copies = torch.cuda.Stream()

    def begin(self, sources: Sequence[Tensor]) -> None:
        """Copies that follow come behind the work of the current stream, and the memory of their sources stays."""
        self.copies.wait_stream(torch.cuda.current_stream())
        for source in sources:  # the allocator waits for the copies before it reuses the memory
            source.record_stream(self.copies)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.copies):
            destination.copy_(source, non_blocking=True)

    def wait_to_copy(self, flag: int, value: int) -> None:
        """Copies that follow start when the flag is at least `value`."""
        self._raise(self._wait(self.copies.cuda_stream, flag, value, GREATER_OR_EQUAL))

    def write_behind_copies(self, flag: int, value: int) -> None:
        """Write the flag behind the copies, whose bytes are visible before it."""
        self._raise(self._write(self.copies.cuda_stream, flag, value, 0))

    def wait(self, flag: int, value: int) -> None:
        """Work that the current stream gets from now on starts when the flag is at least `value`."""
        self._raise(self._wait(torch.cuda.current_stream().cuda_stream, flag, value, GREATER_OR_EQUAL))

    def write(self, flag: int, value: int) -> None:
        """Write the flag behind the work of the current stream."""
        self._raise(self._write(torch.cuda.current_stream().cuda_stream, flag, value, 0))

    def _raise(self, code: int) -> None:
        if code:
            fail(RuntimeError, OP, "a stream memory operation", f"CUDA error {code}", "allowed: none")
