"""Rows are copied by the copy engines of the GPUs of one host: no SM takes part in the copies.

    buffer     of every rank, read by the other ranks; one for rows to operands, one for rows to tokens
    ready      flag in the receiver's memory, per sender: the chunks whose rows are in the sender's buffer
    turn       flag in the next receiver's memory: a copy out of a buffer starts when the copy before it has ended
    taken      flag in the sender's memory, per receiver: the receiver has copied all rows of the transfer
    arrived    flag in the receiver's own memory: the chunks that it has copied

    current stream    wait taken of the transfer before --> kernels write rows to the buffer --> write ready
    copy stream       wait ready, turn --> copy the rows of a chunk from one peer --> write turn, taken, arrived
    current stream    wait arrived --> products

The receiver copies, so rows are received in memory of torch's allocator and are not copied again. Senders that write to
one GPU at the same time slow each other down: 212 GB/s, against 311 to 359 one after another, on four H200. Receivers
that read from one GPU copy one after another, too. A flag holds the number of the transfer that wrote it last; `ready`
holds the number of the chunk in all transfers. So no flag is ever reset. Waits, writes and copies are calls of the
driver with addresses. The same calls with tensors take the host longer than the GPU needs for a chunk.
"""

import ctypes
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.peer import plan
from ...core_kernels.policy.exchange import MOST_CHUNKS, Move, Step
from ..exchange.counts import Request, send_error_sentinel
from ..exchange.shards import Ranks
from ..ops.checks import check_int
from ..ops.private import raw_stream
from .planned_exchange import PlannedExchange
from .symmetric import Shared, has_shared_memory, shared_memory
from .transport import (
    ALIGNMENT,
    CHUNK_BYTES,
    TIMEOUT,
    Part,
    Where,
    allocate_received,
    allocate_rows,
    find_group,
    offsets_of,
    to_milliseconds,
    views_of,
)

OP = "CopyEngines"
BUFFERS: tuple[Where, Where] = ("experts", "tokens")
GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ


class CopyEngines:
    """Copy engines between the GPUs of one host, a process each; the transport of all layers that share a group.

    The transfers of two layers share these buffers in the order of the calls, which must be the same on all ranks.
    Layers that run on two streams at a time take a transport each.

    Args:
        group: a process group or its name, of at least two ranks; None is the default group. Each GPU has two send
            buffers, to the operands and to the tokens, each as large as the rows of the rank that sends most. A buffer
            is allocated when a transfer needs more memory than any before; all ranks then wait for each other.
        chunk_bytes: as of `Collectives`.
        timeout: how long a GPU waits for the rows of the other ranks; then it ends this process with an error of CUDA,
            as `PeerMemory` does.

    Raises:
        NotImplementedError: without CUDA or torch's symmetric memory.
        ValueError: ranks on several hosts.

    Example:
        >>> def overlapped(rows, counts, w1, w3, w2):  # under torchrun, on the GPUs of one host
        ...     return expert_parallel_ffn(rows, counts, w1, w3, w2, transport=CopyEngines())
    """

    def __init__(
        self,
        group: "str | dist.ProcessGroup | None" = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        check_int(OP, "chunk_bytes", chunk_bytes, 1)
        self.chunk_bytes, limit_ms = chunk_bytes, to_milliseconds(OP, timeout)
        if not (torch.cuda.is_available() and has_shared_memory):
            got = "no CUDA" if has_shared_memory else "a torch without torch.distributed._symmetric_memory"
            fail(NotImplementedError, OP, "group", got, "allowed: GPUs of one host; Collectives work everywhere")
        self.group = find_group(OP, group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        hosts: list[Any] = [None] * self.ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=self.group)
        if len(set(hosts)) > 1:
            fail(ValueError, OP, "group", f"ranks on {sorted(set(hosts))}", "allowed: one host; else Collectives")
        self.driver = _Driver(limit_ms)
        self.flags = shared_memory(4 * len(BUFFERS) * self._flags_per_buffer(), self.group)
        self.flags.of_rank[self.rank].zero_()
        torch.cuda.synchronize()
        dist.barrier(self.group)
        self.buffers: dict[Where, Shared | None] = dict.fromkeys(BUFFERS)
        self.transfers: dict[Where, int] = dict.fromkeys(BUFFERS, 0)
        self.weighs_sums = True

    @property
    def config_key(self) -> str:
        return f"{type(self).__name__}(chunk_bytes={self.chunk_bytes})"

    def begin(self, request: Request, width: int) -> PlannedExchange:
        return PlannedExchange(self, request)

    def on_device(self, request: Request, found: object) -> None:
        return None

    def send_error_sentinel(self, ranks: Ranks) -> None:
        send_error_sentinel(ranks)

    def outgoing(self, where: Where, rows: int, parts: Sequence[Part], device: torch.device) -> tuple[Tensor, ...]:
        self.driver.enter()
        buffer, nbytes = self.buffers[where], offsets_of([rows], parts)[-1]
        if buffer is None or buffer.of_rank[self.rank].shape[0] < nbytes:
            return allocate_rows(rows, parts, device)  # `open_transfer` grows the buffer, which takes all ranks
        self._wait_until_taken(where)
        return views_of(buffer.of_rank[self.rank], rows, parts)

    def open_transfer(
        self, where: Where, steps: Sequence[Step], sent: Sequence[int], received: Sequence[int],
        outgoing: tuple[Tensor, ...],
    ) -> "_CopyTransfer":  # fmt: skip
        self.driver.enter()
        parts = [Part(part.shape[1], part.dtype) for part in outgoing]
        buffer = self._grow_buffer(where, max(offsets_of(sent, parts)[-1], ALIGNMENT))
        self._wait_until_taken(where)
        buffers = [
            [memory.data_ptr() + at for at in offsets_of([rows], parts)]
            for memory, rows in zip(buffer.of_rank, sent, strict=True)
        ]
        memory = allocate_received(outgoing, received[self.rank])  # may raise: before the transfer is counted
        self.transfers[where] += 1
        return _CopyTransfer(self, where, self.transfers[where], steps, buffers, outgoing, memory)

    def _wait_until_taken(self, where: Where) -> None:
        """The current stream waits until all ranks have copied the last transfer's rows out of this rank's buffer."""
        for peer in range(self.ranks) if self.transfers[where] else ():
            if peer != self.rank:
                self.driver.wait(self.taken(self.rank, where, peer), self.transfers[where])

    def _grow_buffer(self, where: Where, nbytes: int) -> Shared:
        """The buffer, of at least `nbytes` bytes. All ranks ask for equally many: they grow it in the same transfer."""
        buffer = self.buffers[where]
        if buffer is None or buffer.of_rank[0].shape[0] < nbytes:
            torch.cuda.synchronize()  # with the barrier: nobody reads the old buffer any more
            dist.barrier(self.group)
            buffer = self.buffers[where] = shared_memory(nbytes, self.group)
        return buffer

    def _flags_per_buffer(self) -> int:
        return 2 * self.ranks + (self.ranks - 1) * MOST_CHUNKS + 1

    def flag(self, owner: int, where: Where, index: int) -> int:
        """The address of a flag in the memory of rank `owner`."""
        at = BUFFERS.index(where) * self._flags_per_buffer() + index
        return self.flags.of_rank[owner].data_ptr() + 4 * at

    def taken(self, owner: int, where: Where, by: int) -> int:
        return self.flag(owner, where, by)

    def ready(self, owner: int, where: Where, sender: int) -> int:
        return self.flag(owner, where, self.ranks + sender)

    def turn(self, owner: int, where: Where, step: int) -> int:
        return self.flag(owner, where, 2 * self.ranks + 1 + step)

    def arrived(self, where: Where) -> int:
        return self.flag(self.rank, where, 2 * self.ranks)


class _CopyTransfer:
    """buffers: for each rank the addresses of the parts in its buffer."""

    def __init__(
        self, of: CopyEngines, where: Where, number: int, steps: Sequence[Step], buffers: list[list[int]],
        outgoing: tuple[Tensor, ...], received: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        self.where: Where = where
        self.of, self.number, self.steps, self.buffers = of, number, steps, buffers
        self.outgoing, self.received = outgoing, received
        self.row_bytes = [part.shape[1] * part.dtype.itemsize for part in outgoing]
        self.left = [part.data_ptr() for part in outgoing]
        self.here = [part.data_ptr() for part in received]
        self.direction = 1 if where == "experts" else -1  # of the peers in a step, see `Step`
        of.driver.begin(received)

    def send(self, chunks: range) -> None:
        of = self.of
        for chunk in chunks:
            self._copy_to_buffer(self.steps[chunk])
        for peer in range(of.ranks):
            if peer != of.rank:
                of.driver.write(of.ready(peer, self.where, of.rank), self._chunk(chunks[-1]))
        for chunk in chunks:
            for k in range(1, of.ranks):
                self._take((of.rank - self.direction * k) % of.ranks, chunk, k)
            of.driver.write_behind_copies(of.arrived(self.where), self._chunk(chunk))
        for chunk in chunks:
            own = [move for move in self.steps[chunk].sends if move.peer == of.rank]
            self._copy(of.driver.copy_here, self.here, self.left, own)

    def _chunk(self, chunk: int) -> int:
        """The number of a chunk in all transfers."""
        return self.number * MOST_CHUNKS + chunk

    def _copy(
        self, copy: Callable[[int, int, int], None], destinations: list[int], sources: list[int], moves: Sequence[Move]
    ) -> None:
        for destination, source, nbytes in zip(destinations, sources, self.row_bytes, strict=False):
            for move in moves:
                if move.rows:
                    to, from_ = destination + move.destination * nbytes, source + move.source * nbytes
                    copy(to, from_, move.rows * nbytes)

    def _copy_to_buffer(self, step: Step) -> None:
        """Copy the sent rows to the buffer, unless they are there already."""
        buffer, rank = self.buffers[self.of.rank], self.of.rank
        if any(at != offset for at, offset in zip(self.left, buffer, strict=False)):
            moves = [move._replace(destination=move.source) for move in step.sends if move.peer != rank]
            self._copy(self.of.driver.copy_here, buffer, self.left, moves)

    def _take(self, peer: int, chunk: int, k: int) -> None:
        """Copy the rows of a chunk from a peer, the k-th from which this rank copies."""
        of, driver, turn = self.of, self.of.driver, chunk * (self.of.ranks - 1) + k - 1
        driver.wait_to_copy(of.ready(of.rank, self.where, peer), self._chunk(chunk))
        if turn and of.ranks > 2:
            driver.wait_to_copy(of.turn(of.rank, self.where, turn), self.number)
        moves = [move for move in self.steps[chunk].receives if move.peer == peer]
        self._copy(driver.copy, self.here, self.buffers[peer], moves)
        if turn + 1 < len(self.steps) * (of.ranks - 1) and of.ranks > 2:
            after = (peer + self.direction * ((turn + 1) % (of.ranks - 1) + 1)) % of.ranks
            driver.write_behind_copies(of.turn(after, self.where, turn + 1), self.number)
        if chunk + 1 == len(self.steps):
            driver.write_behind_copies(of.taken(peer, self.where, of.rank), self.number)

    def wait(self, chunk: int) -> None:
        self.of.driver.wait(self.of.arrived(self.where), self._chunk(chunk))

    def abandon(self) -> None:
        # After the copies of the sent chunks: this rank no longer reads the buffers of this transfer.
        of = self.of
        for peer in range(of.ranks):
            if peer != of.rank:
                of.driver.write_behind_copies(of.taken(peer, self.where, of.rank), self.number)


class _Driver:
    """Copies, and waits and writes of flags of 32 bits, on the stream of copies or on the current one.

    The current stream waits in a kernel, which has a time limit and a multiprocessor that has nothing else to do. Waits
    on the stream of copies have none: the current stream waits for these copies.
    """

    def __init__(self, limit_ms: int) -> None:
        self.limit_ms = limit_ms
        self.wait_kernel = import_module(plan.__name__.replace(".plan", ".kernel")).wait_kernel
        self._compiled_wait: Any = None
        library = ctypes.CDLL("libcuda.so.1")
        self._wait, self._write = library.cuStreamWaitValue32_v2, library.cuStreamWriteValue32_v2
        self._context, self._enter = ctypes.c_void_p(), library.cuCtxSetCurrent
        torch.cuda.synchronize()  # there is a context
        self._raise(library.cuCtxGetCurrent(ctypes.byref(self._context)))
        for function in (self._wait, self._write):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._copy = library.cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self.copies = torch.cuda.Stream()
        self.stream = self.copies.cuda_stream
        self.index = self.copies.device.index

    def enter(self) -> None:
        """Before other calls: a thread of autograd has no context before its first call of the runtime."""
        self._raise(self._enter(self._context))

    def begin(self, received: Sequence[Tensor]) -> None:
        """Copies that follow come behind the work of the current stream, which may have used this memory before."""
        self.copies.wait_stream(torch.cuda.current_stream())
        for part in received:  # the allocator waits for the copies before it reuses the memory
            part.record_stream(self.copies)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy bytes between addresses on the stream of copies."""
        self._raise(self._copy(destination, source, nbytes, self.stream))

    def copy_here(self, destination: int, source: int, nbytes: int) -> None:
        """Copy bytes between addresses on the current stream."""
        self._raise(self._copy(destination, source, nbytes, raw_stream(self.index)))

    def wait_to_copy(self, flag: int, value: int) -> None:
        """Copies that follow start when the flag is at least `value`."""
        self._raise(self._wait(self.stream, flag, value, GREATER_OR_EQUAL))

    def write_behind_copies(self, flag: int, value: int) -> None:
        """Write the flag behind the copies."""
        self._raise(self._write(self.stream, flag, value, 0))

    def wait(self, flag: int, value: int) -> None:
        """Work that the current stream gets from now on starts when the flag is at least `value`; after the time limit
        this process gets an error of CUDA."""
        if self._compiled_wait is None:
            with torch.cuda.device(self.index):
                self._compiled_wait = self.wait_kernel[(1,)](flag, value, self.limit_ms, num_warps=1)[(1, 1, 1)]
        else:  # Triton's own look-up takes the host longer than the launch
            self._compiled_wait(flag, value, self.limit_ms, stream=raw_stream(self.index))

    def write(self, flag: int, value: int) -> None:
        """Write the flag behind the work of the current stream, whose bytes are visible before it."""
        self._raise(self._write(raw_stream(self.index), flag, value, 0))

    def _raise(self, code: int) -> None:
        if code:
            fail(
                RuntimeError,
                OP,
                "a call of the driver",
                f"CUDA error {code}",
                hint="see CUresult of the CUDA driver API",
            )
