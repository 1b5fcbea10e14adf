"""The order of copies and flags of CopyEngines, without GPUs: a thread per rank, a thread per stream of copies, flags
and boxes in the memory of this process."""

import ctypes
import random
import threading
import time
from collections.abc import Callable
from queue import Queue
from typing import Any, ClassVar

import pytest
import torch
from mxep.core_kernels.exchange import plan_exchange
from mxep.torch_frontend import copy_engines
from mxep.torch_frontend._torch_private import Shared
from mxep.torch_frontend.copy_engines import CopyEngines
from mxep.torch_frontend.transport import Part

RANKS = 3
BIGGEST = (6, 20, 8, 8, 30, 9, 30, 9)
"""Rows of an expert in each leg, at most: the boxes grow, and they are used again."""
TIMEOUT = 20.0


class Host:
    """What the ranks share: a barrier and the boxes that they allocate together."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=TIMEOUT)
        self.memory: dict[int, list[torch.Tensor]] = {}
        self.calls = threading.local()

    def shared_memory(self, nbytes: int, group: "Group") -> Shared:
        self.calls.number = getattr(self.calls, "number", -1) + 1
        if group.rank() == 0:
            # Flags are zero, boxes are not.
            fill = 0 if self.calls.number == 0 else 255
            memory = [torch.full((nbytes,), fill, dtype=torch.uint8) for _ in range(RANKS)]
            self.memory[self.calls.number] = memory
            Driver.boxes.update({of.data_ptr(): nbytes for of in memory})
        self.barrier.wait()
        assert self.memory[self.calls.number][0].shape == (nbytes,)
        return Shared(list(self.memory[self.calls.number]), None)


class Group:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return RANKS


class Driver:
    """Copies and their flags run in a thread of their own, each after a random delay. Two copies at a time out of one
    box are an error."""

    boxes: ClassVar[dict[int, int]] = {}
    read: ClassVar[set[int]] = set()
    failures: ClassVar[list[BaseException]] = []

    def __init__(self) -> None:
        self.queue: Queue[Callable[[], object]] = Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        delays = random.Random(0)
        while True:
            work = self.queue.get()
            time.sleep(delays.random() * 1e-3 if delays.random() < 0.98 else 0.02)
            work()

    def enter(self) -> None:
        pass

    def begin(self, received: Any) -> None:
        for part in received:  # a row that no copy writes is seen
            part.fill_(7)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.queue.put(lambda: self._copy(destination, source, nbytes))

    def _copy(self, destination: int, source: int, nbytes: int) -> None:
        box = next(at for at, size in self.boxes.items() if at <= source < at + size)
        if box in self.read:
            self.failures.append(AssertionError("two copies out of one box"))
        self.read.add(box)
        time.sleep(5e-4)
        ctypes.memmove(destination, source, nbytes)
        self.read.discard(box)

    def copy_here(self, destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(destination, source, nbytes)

    def wait_to_copy(self, flag: int, value: int) -> None:
        self.queue.put(lambda: self.wait(flag, value))

    def write_behind_copies(self, flag: int, value: int) -> None:
        self.queue.put(lambda: self.write(flag, value))

    def wait(self, flag: int, value: int) -> None:
        stop = time.monotonic() + TIMEOUT
        while ctypes.c_int32.from_address(flag).value < value:
            assert time.monotonic() < stop, "a flag was never written"
            time.sleep(1e-4)

    def write(self, flag: int, value: int) -> None:
        ctypes.c_int32.from_address(flag).value = value


def row_of(leg: int, rank: int, row: int) -> int:
    """The value of a row, which names its leg, its first rank and its place there."""
    return leg * 10000 + rank * 1000 + row + 1


def exchange(engines: CopyEngines, leg: int) -> None:
    """There and back once, or there alone; every row is where the plan puts it."""
    local, rank = 2 + leg % 2 * 8, engines.rank  # 10 experts: chunks of several
    numbers = random.Random(leg)
    table = [
        [numbers.randrange(BIGGEST[leg]) * (numbers.random() < 0.8) for _ in range(RANKS * local)] for _ in range(RANKS)
    ]
    plan = plan_exchange(table, rank, 32)
    mine = torch.tensor([row_of(leg, rank, i) for i in range(plan.token_rows[rank])], dtype=torch.int32)
    values = mine[:, None].repeat(1, 5), mine[:, None].repeat(1, 2).to(torch.uint8)
    parts = [Part(5, torch.int32), Part(2, torch.uint8)]
    device = torch.device("cpu")
    leaving = values if leg % 3 == 2 else engines.outgoing("experts", mine.shape[0], parts, device)
    if rank == leg % RANKS:
        time.sleep(0.03)  # the others may not read before
    for place, value in zip(leaving, values, strict=True):
        place.copy_(value)
    there = engines.leg("experts", plan.to_experts, plan.token_rows, plan.operand_rows, leaving)
    back = None
    if leg % 3:  # a backward without gradients of rows has no way back, and the next leg starts sooner
        room = engines.outgoing("tokens", plan.operand_rows[rank], parts[:1], device)
        back = engines.leg("tokens", plan.to_tokens, plan.operand_rows, plan.token_rows, room)
    there.send(range(len(plan.chunks)))
    starts = [[sum(row[:e]) for e in range(len(row))] for row in table]
    for c, chunk in enumerate(plan.chunks):
        there.wait(c)
        rows, others = (part[chunk.start : chunk.end] for part in there.received)
        at = 0
        for e in range(rank * local + chunk.first, rank * local + chunk.last):
            want = [row_of(leg, s, starts[s][e] + i) for s in range(RANKS) for i in range(table[s][e])]
            assert rows[at : at + len(want), 4].tolist() == want
            assert others[at : at + len(want), 1].tolist() == [value % 256 for value in want]
            at += max(-(-len(want) // 32), 1) * 32
        if rank == leg % RANKS:
            time.sleep(2e-3)
        if back is not None:
            back.outgoing[0][chunk.start : chunk.end] = rows * 2
            back.send(range(c, c + 1))
    if back is not None:
        for c in range(len(plan.chunks)):
            back.wait(c)
        assert torch.equal(back.received[0], values[0] * 2)


def test_rows_arrive_in_every_leg(monkeypatch: pytest.MonkeyPatch) -> None:
    host, failures = Host(), Driver.failures
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(copy_engines, "has_shared_memory", True)
    monkeypatch.setattr(copy_engines, "shared_memory", host.shared_memory)
    monkeypatch.setattr(copy_engines, "group_of", lambda op, group: group)
    monkeypatch.setattr(copy_engines, "_Driver", Driver)
    monkeypatch.setattr(copy_engines.dist, "barrier", lambda group: host.barrier.wait())
    monkeypatch.setattr(
        copy_engines.dist,
        "all_gather_object",
        lambda hosts, name, group: hosts.__setitem__(slice(None), [name] * RANKS),
    )

    def run(rank: int) -> None:
        try:
            engines = CopyEngines(Group(rank))  # type: ignore[arg-type]
            for leg in range(len(BIGGEST)):
                exchange(engines, leg)
        except BaseException as error:
            failures.append(error)
            host.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
