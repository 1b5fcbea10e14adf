"""The order of copies and flags of CopyEngines, without GPUs: a thread per rank, a thread per stream of copies, flags
and buffers in the memory of this process."""

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Queue
from typing import Any

import pytest
import torch
from mxep.core_kernels.policy.exchange import plan_exchange
from mxep.torch_frontend.overlap import copy_engines
from mxep.torch_frontend.overlap.copy_engines import CopyEngines
from mxep.torch_frontend.overlap.symmetric import Shared
from mxep.torch_frontend.overlap.transport import Part
from torch import Tensor

BIGGEST = (6, 20, 8, 8, 30, 9, 30, 9)
"""Rows of an expert in each transfer, at most: the buffers grow, and they are used again."""
TIMEOUT = 20.0
CPU = torch.device("cpu")


class Host:
    """What the ranks share: a barrier, the buffers that they allocate together, and what went wrong, which ends all."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.limit = ranks, timedelta(seconds=TIMEOUT)
        self.barrier = threading.Barrier(ranks, timeout=TIMEOUT)
        self.memory: dict[int, list[Tensor]] = {}
        self.calls = threading.local()
        self.buffers: dict[int, int] = {}
        self.read: set[int] = set()
        self.failures: list[BaseException] = []

    def shared_memory(self, nbytes: int, group: "Group") -> Shared:
        self.calls.number = getattr(self.calls, "number", -1) + 1
        if group.rank() == 0:
            # Flags are zero, buffers are not.
            fill = 0 if self.calls.number == 0 else 255
            memory = [torch.full((nbytes,), fill, dtype=torch.uint8) for _ in range(self.ranks)]
            self.memory[self.calls.number] = memory
            self.buffers.update({of.data_ptr(): nbytes for of in memory})
        self.barrier.wait()
        assert self.memory[self.calls.number][0].shape == (nbytes,)
        return Shared(list(self.memory[self.calls.number]), None)

    def run(self, work: Callable[[CopyEngines], None]) -> None:
        """`work` in a thread per rank; raises the first error."""

        def of_rank(rank: int) -> None:
            try:
                work(CopyEngines(Group(rank, self.ranks), timeout=self.limit))  # type: ignore[arg-type]
            except BaseException as error:
                self.failures.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT)
        if self.failures:
            raise self.failures[0]
        assert not any(thread.is_alive() for thread in threads)


class Group:
    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


CURRENT = object()
"""The current stream of every rank, whose work the rank's thread does."""


class Copies:
    """The stream of copies, as torch's allocator knows it. recorded: memory that it does not reuse before the copies
    have ended."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []
        self.behind: object = None

    def wait_stream(self, stream: object) -> None:
        self.behind = stream


def record(part: Tensor, stream: Copies) -> None:
    stream.recorded.append(part)


class Driver(copy_engines._Driver):
    """Copies and their flags run in a thread of their own, each after a random delay. Two copies at a time out of one
    buffer are an error, and so are copies to memory that the allocator may have given away.

    may_copy: the thread goes on while it is set. when_blocked: called before the current stream waits for a flag.
    """

    def __init__(self, host: Host, limit_ms: int) -> None:
        self.host, self.copies, self.limit_ms = host, Copies(), limit_ms  # type: ignore[assignment]
        self.queue: Queue[Callable[[], object]] = Queue()
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.when_blocked: Callable[[], None] = lambda: None
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        delays = random.Random(0)
        while True:
            work = self.queue.get()
            time.sleep(delays.random() * 1e-3 if delays.random() < 0.98 else 0.02)
            self.may_copy.wait(TIMEOUT)
            if self.host.failures:  # the memory of a rank that has ended may be gone
                return
            try:
                work()
            except BaseException as error:
                self.host.failures.append(error)
                return

    def enter(self) -> None:
        pass

    def begin(self, received: Sequence[Tensor]) -> None:
        self.copies.behind = None  # type: ignore[attr-defined]
        super().begin(received)
        assert self.copies.behind is CURRENT  # type: ignore[attr-defined]
        for part in received:  # a row that no copy writes is seen
            part.fill_(7)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        recorded: list[Tensor] = self.copies.recorded  # type: ignore[attr-defined]
        kept = any(0 <= destination - of.data_ptr() <= of.nbytes - nbytes for of in recorded)
        assert kept, "rows are received in memory that is not recorded on the stream of copies"
        self.queue.put(lambda: self._copy_out(destination, source, nbytes))

    def _copy_out(self, destination: int, source: int, nbytes: int) -> None:
        read = self.host.read
        buffer = next(at for at, size in self.host.buffers.items() if at <= source < at + size)
        assert buffer not in read, "two copies out of one buffer"
        read.add(buffer)
        time.sleep(5e-4)
        ctypes.memmove(destination, source, nbytes)
        read.discard(buffer)

    def copy_here(self, destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(destination, source, nbytes)

    def wait_to_copy(self, flag: int, value: int) -> None:
        self.queue.put(lambda: self._until(flag, value))

    def write_behind_copies(self, flag: int, value: int) -> None:
        self.queue.put(lambda: self.write(flag, value))

    def wait(self, flag: int, value: int) -> None:
        if ctypes.c_int32.from_address(flag).value < value:
            self.when_blocked()
        try:
            self._until(flag, value, self.limit_ms / 1000)
        except TimeoutError as error:  # the kernel's trap
            raise RuntimeError("CUDA error: unspecified launch failure") from error

    def _until(self, flag: int, value: int, limit: float = TIMEOUT) -> None:
        stop = time.monotonic() + limit
        while ctypes.c_int32.from_address(flag).value < value:
            assert not self.host.failures, "another rank has failed"
            if time.monotonic() > stop:
                raise TimeoutError("a flag was never written")
            time.sleep(1e-4)

    def write(self, flag: int, value: int) -> None:
        ctypes.c_int32.from_address(flag).value = value


@pytest.fixture
def host_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Host]:
    """A host of so many ranks, whose CopyEngines have the drivers above."""

    def host_of(ranks: int) -> Host:
        host = Host(ranks)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: CURRENT)
        monkeypatch.setattr(Tensor, "record_stream", record)
        monkeypatch.setattr(copy_engines, "has_shared_memory", True)
        monkeypatch.setattr(copy_engines, "shared_memory", host.shared_memory)
        monkeypatch.setattr(copy_engines, "find_group", lambda op, group: group)
        monkeypatch.setattr(copy_engines, "_Driver", lambda limit_ms: Driver(host, limit_ms))
        monkeypatch.setattr(copy_engines.dist, "barrier", lambda group: host.barrier.wait())
        monkeypatch.setattr(
            copy_engines.dist,
            "all_gather_object",
            lambda hosts, name, group: hosts.__setitem__(slice(None), [name] * ranks),
        )
        return host

    return host_of


def row_of(transfer: int, rank: int, row: int) -> int:
    """The value of a row, which names its transfer, its first rank and its offset there."""
    return transfer * 10000 + rank * 1000 + row + 1


def exchange(engines: CopyEngines, transfer: int, failing_chunk: int | None = None) -> None:
    """There and back once, or there alone; every row is where the plan puts it. At `failing_chunk` the rank gets an
    error."""
    local, rank, ranks = 2 + transfer % 2 * 8, engines.rank, engines.ranks  # 10 experts: chunks of several
    numbers = random.Random(transfer)
    table = [
        [numbers.randrange(BIGGEST[transfer]) * (numbers.random() < 0.8) for _ in range(ranks * local)]
        for _ in range(ranks)
    ]
    plan = plan_exchange(table, rank, 32)
    mine = torch.tensor([row_of(transfer, rank, i) for i in range(plan.token_rows[rank])], dtype=torch.int32)
    values = mine[:, None].repeat(1, 5), mine[:, None].repeat(1, 2).to(torch.uint8)
    parts = [Part(5, torch.int32), Part(2, torch.uint8)]
    leaving = values if transfer % 3 == 2 else engines.outgoing("experts", mine.shape[0], parts, CPU)
    if rank == transfer % ranks:
        time.sleep(0.03)  # the others may not read before
    for place, value in zip(leaving, values, strict=True):
        place.copy_(value)
    there = engines.open_transfer("experts", plan.to_experts, plan.token_rows, plan.operand_rows, leaving)
    back = None
    if transfer % 3:  # a backward without gradients of rows sends no row back, and the next transfer starts sooner
        buffer = engines.outgoing("tokens", plan.operand_rows[rank], parts[:1], CPU)
        back = engines.open_transfer("tokens", plan.to_tokens, plan.operand_rows, plan.token_rows, buffer)
    there.send(range(len(plan.chunks)))
    starts = [[sum(row[:e]) for e in range(len(row))] for row in table]
    for c, chunk in enumerate(plan.chunks):
        there.wait(c)
        rows, others = (part[chunk.start : chunk.end] for part in there.received)
        at = 0
        for e in range(rank * local + chunk.first, rank * local + chunk.last):
            want = [row_of(transfer, s, starts[s][e] + i) for s in range(ranks) for i in range(table[s][e])]
            assert rows[at : at + len(want), 4].tolist() == want
            assert others[at : at + len(want), 1].tolist() == [value % 256 for value in want]
            at += max(-(-len(want) // 32), 1) * 32
        if rank == transfer % ranks:
            time.sleep(2e-3)
        if c == failing_chunk:
            for opened in (there, back):
                if opened is not None:
                    opened.abandon()
            return
        if back is not None:
            back.outgoing[0][chunk.start : chunk.end] = rows * 2
            back.send(range(c, c + 1))
    if back is not None:
        for c in range(len(plan.chunks)):
            back.wait(c)
        assert torch.equal(back.received[0], values[0] * 2)


def test_rows_arrive_in_every_transfer(host_of: Callable[[int], Host]) -> None:
    def work(engines: CopyEngines) -> None:
        for transfer in range(len(BIGGEST)):
            exchange(engines, transfer)

    host_of(3).run(work)


@pytest.mark.parametrize("transfer", [1, 3, 7])  # 3 has no way back
@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_a_transfer_after_an_error_of_all_ranks(host_of: Callable[[int], Host], transfer: int, chunk: int) -> None:
    """The rows of the next transfers are right, and no rank waits for the rows of the ended transfer."""

    def work(engines: CopyEngines) -> None:
        for number in range(len(BIGGEST)):
            exchange(engines, number, chunk if number == transfer else None)

    host_of(3).run(work)


def test_a_rank_that_does_not_send_ends_the_others(host_of: Callable[[int], Host]) -> None:
    """Their current streams wait no longer than the time limit."""
    host = host_of(3)
    host.limit = timedelta(seconds=0.5)
    ended: list[int] = []
    others_ended = threading.Barrier(3, timeout=TIMEOUT)

    def run(engines: CopyEngines) -> None:
        exchange(engines, 0)
        if engines.rank == 1:
            exchange(engines, 1, failing_chunk=1)
        else:
            with pytest.raises(RuntimeError, match="CUDA error"):
                exchange(engines, 1)
            ended.append(engines.rank)
        others_ended.wait()  # memory of the ranks lives until all have ended

    host.run(run)
    assert sorted(ended) == [0, 2]


@pytest.mark.parametrize("rows", ["in the buffer", "of the caller"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_copies_after_another_has_begun_its_next_transfer(
    host_of: Callable[[int], Host], ranks: int, rows: str
) -> None:
    """Rank 0 delays its copies of the second transfer. It copies when the last rank waits for rank 0, or has run its
    third transfer as far as it can alone. `open_transfer` copies rows of the caller to the buffer; other rows are there
    already."""
    host, each, last = host_of(ranks), 4, ranks - 1
    may_copy = threading.Event()
    may_copy.set()

    def open_transfer(engines: CopyEngines, number: int) -> Any:
        rank = engines.rank
        plan = plan_exchange([[each] * ranks] * ranks, rank, 32)
        values: Any = torch.tensor([[row_of(number, rank, i)] for i in range(each * ranks)], dtype=torch.int32)
        leaving = (values,)
        if rows == "in the buffer":
            leaving = engines.outgoing("experts", each * ranks, [Part(1, torch.int32)], CPU)
            leaving[0].copy_(values)
        transfer = engines.open_transfer("experts", plan.to_experts, plan.token_rows, plan.operand_rows, leaving)
        transfer.send(range(1))
        return transfer

    def check(engines: CopyEngines, transfer: Any, number: int) -> None:
        transfer.wait(0)
        want = [row_of(number, s, each * engines.rank + i) for s in range(ranks) for i in range(each)]
        assert transfer.received[0][: len(want), 0].tolist() == want

    def work(engines: CopyEngines) -> None:
        driver: Any = engines.driver
        check(engines, open_transfer(engines, 0), 0)  # the first transfer allocates the buffers
        if engines.rank == 0:
            driver.may_copy = may_copy
            may_copy.clear()
        check(engines, open_transfer(engines, 1), 1)
        if engines.rank == last:
            assert not may_copy.is_set()
            driver.when_blocked = may_copy.set
        check(engines, open_transfer(engines, 2), 2)

    host.run(work)
