"""Memory of the GPUs of one host that kernels of all of them write and read: exchanges for which the host computes no
offset. It reads the counts of all ranks where a call may have several rounds (rounds.py), else no size.

    counts     (ranks, E) int32: every rank writes its row into the memory of all
    experts    rows to operands: the ranks of the tokens write them to their final offset
    tokens     rows to tokens: the products write them, the ranks of the tokens read and sum them

    share counts | meet | lay_out, push rows | meet | products | meet | pull rows        forward
                   meet | push rows          | meet | products | meet | pull rows        backward

`meet` is a barrier in the stream, a kernel that signals every rank with release and waits for its signal with acquire,
both of system scope. A kernel's stores are complete when the kernel ends, before the signal; the loads of the next
kernel come after the wait. So what was written before a rank's barrier is seen after the barrier of any other.

The first barrier of each direction keeps a fast rank from writing memory that a slow rank still reads. A rank signals
it after all its reads of the direction before, of operands and of rows of its peers. Counts need no barrier of their
own. At least the second barrier of a direction separates the kernel that reads counts from the next kernel that writes
them.

peer_experts.py runs these steps, device_exchange.py others that overlap with the products, where the kernels take the
call: a feed-forward or one product. The kernels are in core_kernels/peer.
"""

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.launch import fail
from ...core_kernels.peer import plan
from ...core_kernels.peer.programs.writer import Memory
from ...core_kernels.policy.overflow import OnOverflow, check_on_overflow
from ...core_kernels.policy.rounds import CAPACITY_FACTOR
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request, checked_rows, shared_arguments
from ..exchange.process_groups import can_compare, compare_calls, key_of, name_of, table_of_ranks
from ..exchange.shards import Ranks
from ..ops.checks import check_flag, check_int, check_positive
from ..ops.launch import check_devices
from ..ops.private import group_named
from . import device_exchange
from .device_call import DeviceCall
from .local_experts import LocalExperts
from .peer_exchange import PeerExchange, lay_out, share_counts
from .rounds import Later, list_later, start_reading
from .rows import ALIGNMENT, Part, Where, list_transfer_parts, offsets_of, views_of
from .symmetric import Shared, barrier, has_shared_memory, shared_memory

OP = "PeerMemory"
WIDTH = 1024
TIMEOUT = timedelta(minutes=10)
WHERE: tuple[Where, Where] = ("experts", "tokens")


class MappedBuffer(NamedTuple):
    """Mapped memory. addresses (ranks,) int64: of each rank's. starts: the first byte of the counts, of the rows to
    experts and of the rows to tokens, and the end."""

    shared: Shared
    addresses: Tensor
    starts: tuple[int, ...]


class PeerMemory:
    """The memory that the GPUs of one host, a process each, map for exchanges between them.

    A rank has a capacity: the rows from all ranks that it takes at a time. If the counts say that some rank gets more,
    the call has several rounds, on all ranks, and no row is lost. A round takes whole experts, in their order, while
    they fit. An expert is split if a round of its own is too short for its rows. Outputs and the gradients of rows and
    probabilities have the bytes of one round, and so have the weight gradients of an expert that is not split. A split
    expert's weight gradients are a sum over its rounds, in the dtype of the weights. Only the first round saves its
    state: the backward repeats the forward of the others, from the rows.

    The host reads the counts once per forward. In calls that overlap it reads them after it has launched the first
    round, so that the GPU does not wait; other calls wait for them. The backward reads nothing. A CUDA graph cannot
    read them: it takes rounds=False, which has one round. A graph of empty rounds would launch about 80 kernels for
    each, forward and backward, in every step.

    On every GPU the memory holds the rows of the capacity, with the padding of the groups. It is allocated when a call
    needs more than any before, never while a graph is captured; all ranks then wait for each other once. GEMMs, their
    operands and saved tensors are as long as the capacity.

    On Hopper feed-forwards and products of recipe "mxfp8" overlap with their exchange, at the sizes in
    docs/guides/overlap.md. Other calls send rows before and after their GEMMs.

    Calls share the memory in their order, which must be one on all ranks. Layers that run on two streams at a time take
    one each. Layers with prob_in="combine" raise: their backward reads rows that this memory does not keep.

    Args:
        group: a process group or its name, of at least two ranks; None is the default group.
        rows: the capacity of a rank, in rows from all ranks together.
        capacity_factor: the capacity of a rank, relative to the mean rows of a rank; not with `rows`. At most what a
            rank can get: all tokens, each min(top_k, local experts) times. With rounds the call with the most rows so
            far sets it, else the first call. None without `rows`: 1.25 with rounds, else what a rank can get if each
            rank has as many tokens as the longest one in the first call.
        rounds: whether a call may have several rounds. False: the host reads nothing, and a CUDA graph can capture the
            layers. Then the outputs of tokens with a row beyond the capacity are NaN, their gradients too, and
            `overflow` raises, on all ranks.
        on_overflow: without rounds, what a row beyond the capacity makes of its token. "nan": as above. "drop": the row
            is zero in the sum of its token, and so are its gradients; `overflow` raises as well.
        width: programs of the kernels that write and read rows of peers.
        timeout: how long a GPU waits for the other ranks; then it ends this process with an error of CUDA.

    Raises:
        NotImplementedError: without CUDA or torch's symmetric memory.
        ValueError: ranks on several hosts.

    Example:
        >>> def overlapped(rows, counts, w1, w3, w2):  # under torchrun, on the GPUs of one host
        ...     return expert_parallel_ffn(rows, counts, w1, w3, w2, transport=PeerMemory())
    """

    def __init__(
        self,
        group: "str | dist.ProcessGroup | None" = None,
        rows: int | None = None,
        *,
        capacity_factor: float | None = None,
        rounds: bool = True,
        on_overflow: OnOverflow = "nan",
        width: int = WIDTH,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        if rows is not None:
            check_int(OP, "rows", rows, 1)
        if capacity_factor is not None:
            check_positive(OP, "capacity_factor", capacity_factor)
            if rows is not None:
                fail(ValueError, OP, "capacity_factor", f"{capacity_factor} and rows={rows}", "allowed: one of the two")
        check_flag(OP, "rounds", rounds)
        check_on_overflow(OP, on_overflow)
        if rounds and on_overflow != "nan":
            fail(ValueError, OP, "on_overflow", f"{on_overflow!r} and rounds=True", "allowed: with rounds=False")
        check_int(OP, "width", width, 1)
        self.timeout_ms = _to_milliseconds(timeout)
        if got := _missing():
            fail(NotImplementedError, OP, "group", got, "allowed: GPUs of one host; other groups take no transport")
        self.group = _find_group(group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        if rounds and rows is None and capacity_factor is None:
            capacity_factor = CAPACITY_FACTOR
        self.rows, self.capacity_factor, self.rounds = rows, capacity_factor, rounds
        self.on_overflow, self.width = on_overflow, width
        hosts: list[Any] = [None] * self.ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=self.group)
        if len(set(hosts)) > 1:
            fail(ValueError, OP, "group", f"ranks on {sorted(set(hosts))}", "allowed: one host; else no transport")
        self.kernels = import_module(plan.__name__.replace(".plan", ".kernel"))
        self.device = _device()
        self.worst = torch.zeros((self.ranks, 2), dtype=torch.int32, device=self.device)
        self.most = rows
        self.longest = 0
        self.compared: set[int] = set()
        self.interrupted = False
        self.buffer: MappedBuffer | None = None
        self.of_graphs: list[MappedBuffer] = []
        self.side = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self.programs: dict[Any, Any] = {}

    @property
    def config_key(self) -> str:
        options = f"rows={self.rows}, capacity_factor={self.capacity_factor}, rounds={self.rounds}"
        return f"PeerMemory({options}, on_overflow={self.on_overflow!r})"

    def begin(self, request: Request, width: int) -> PeerExchange:
        """Memory for a request whose experts return rows of this width, and its layout; ends with the first barrier."""
        x, recipe = request.x, request.recipe
        parts = list_transfer_parts(recipe, x.shape[1], x.dtype, width) if request.error is None else []

        def needs(capacity: int, room: int) -> list[int]:
            return [max(offsets_of(capacity, p)[-1] for at, p in parts if at == where) for where in WHERE]

        rows, num_rows, capacity, _ = self._reserve_for(request, needs)
        later: Sequence[Later] = ()
        with torch.no_grad(), self.uninterrupted():
            counts = share_counts(self, request.counts)
            if self.rounds:
                of_all, experts, alignment = start_reading(counts)(), counts.shape[1], recipe.alignment
                of_ranks = of_all.clip(0).sum(1).tolist()
                self.note_rows(of_ranks, max(of_ranks))
                if capacity != (more := self.capacity(experts // self.ranks, alignment))[0]:
                    capacity, _ = more
                    self.allocate(experts, needs(*more))
                    counts = share_counts(self, request.counts)
                later = list_later(of_all, self.rank, num_rows, capacity, alignment, self.device)
            layout = lay_out(self, counts, num_rows, capacity, recipe.alignment)
        return PeerExchange(self, layout, rows, later)

    def on_device(self, request: Request, found: LocalExperts | None) -> DeviceCall | None:
        """The call whose exchange the device drives, with memory for it; None where another exchange has to run."""
        if request.error is not None or found is None or not device_exchange.takes(request, found, self.device):
            return None
        top_k = request.rows.top_k if isinstance(request.rows, TokenReplicas) else 1
        widest = max(request.x.shape[1], found.width)
        # The kernel that pulls a row divides the slot by its own rank's top_k: all ranks need the same.
        also = {**request.also, "exchange": "on the device", "top_k": top_k}

        def needs(capacity: int, room: int) -> list[int]:
            return [Memory.of(0, room, top_k, widest).end, 0]

        _, num_rows, capacity, room = self._reserve_for(request._replace(also=also), needs)
        if num_rows > room and not self.rounds:
            self.interrupt()
            allowed = f"allowed: {room}, the capacity with padding; state more `rows` or a larger `capacity_factor`"
            fail(ValueError, OP, "rows", f"{num_rows} rows of rank {self.rank}", allowed)
        return device_exchange.call_of(self, request, found, capacity, room)

    def _reserve_for(
        self, request: Request, needs: Callable[[int, int], list[int]]
    ) -> tuple[Tensor | TokenReplicas, int, int, int]:
        """The rows of a checked request, their number, and `capacity`. needs: bytes of rows to experts and of rows to
        tokens, for this capacity."""
        op, error, ranks = "dispatch", request.error, request.ranks
        rows, num_rows, shared = request.rows, 0, {}
        if self.rounds and _capturing():
            hint = "state PeerMemory(rounds=False): the host reads how many rounds a call has"
            fail(RuntimeError, op, "transport", "rounds=True in a CUDA graph", hint=hint)
        try:
            if error is None:
                rows, num_rows = checked_rows(request)
                check_devices(op, "transport", self.device, rows=request.x)
                also = {"experts": request.counts.shape[0], **request.also}
                shared = shared_arguments(request._replace(also=also))
        except (TypeError, ValueError) as found:
            error = found
        if error is not None:
            self.interrupt()
            if self.buffer is None and can_compare(ranks.group_name):
                compare_calls(op, shared, ranks.group_name, error)  # the others do before they allocate, and raise too
            raise error
        top_k = rows.top_k if isinstance(rows, TokenReplicas) else 1
        with torch.no_grad(), self.uninterrupted():
            experts, alignment = request.counts.shape[0], request.recipe.alignment
            capacity, room = self.reserve(op, num_rows, top_k, experts, alignment, needs, shared)
        return rows, num_rows, capacity, room

    def send_error_sentinel(self, ranks: Ranks) -> None:
        """There is no exchange that tells the others: they wait for this rank until their time limit."""
        self.interrupt()

    def overflow(self) -> None:
        """Raise if rows were lost since the last call of this method: never with rounds.

        The host waits for the GPU. All ranks find the same.

        Raises:
            RuntimeError: rows exceeded the capacity; the message has the numbers.

        Example:
            >>> def step(loss, memory):  # after the backward of a step
            ...     loss.backward()
            ...     memory.overflow()
        """
        found = self.worst.tolist()
        self.worst.zero_()
        for rank, (beyond, rows) in enumerate(found):
            if beyond > 0:
                allowed = f"allowed: {rows - beyond}; state more `rows`, a larger `capacity_factor`, or neither"
                fail(RuntimeError, OP, "rows", f"groups of {rows} rows with padding on rank {rank}", allowed)

    def reserve(
        self, op: str, rows: int, top_k: int, experts: int, alignment: int, needs: Callable[[int, int], list[int]],
        shared: Mapping[str, Any],
    ) -> tuple[int, int]:  # fmt: skip
        """Memory for the transfers of a call, allocated if there is less; returns `capacity`.

        Args:
            rows: of this rank, top_k of each token.
            needs: as in `_reserve_for`.
            shared: arguments that the ranks compare in the first call that has them, in the first after an error, and
                before they allocate.
        """
        capturing, local = _capturing(), experts // self.ranks
        new = key_of(shared) not in self.compared
        if new and not capturing:
            self._compare(op, shared)
        if self.most is None and not capturing:
            table = table_of_ranks(op, [rows, rows * min(top_k, local) // top_k], self.group.group_name)
            all_rows, to_one_rank = zip(*table, strict=True)
            self.note_rows(all_rows, max(to_one_rank))
        capacity, room = self.capacity(local, alignment)
        sizes = needs(capacity, room)
        if self._lacks(experts, sizes):
            if capturing:
                got, hint = "a call that needs more than any before, in a graph", "run the layer once at these sizes"
                fail(RuntimeError, op, "transport", got, hint=f"{hint} before the capture")
            if not new:
                self._compare(op, shared)
            self.allocate(experts, sizes)
        if capturing and self.buffer is not None and not any(buffer is self.buffer for buffer in self.of_graphs):
            self.of_graphs.append(self.buffer)  # the graph has its addresses
        return capacity, room

    def note_rows(self, rows: Sequence[int], to_one_rank: int) -> None:
        """Make the capacity large enough for a call, unless `rows` is stated; the same on all ranks. rows: of each
        rank. to_one_rank: the most rows that a rank can have for the experts of one."""
        most = self.ranks * to_one_rank
        if self.capacity_factor is not None:
            most = min(most, math.ceil(self.capacity_factor * sum(rows) / self.ranks))
        self.longest = max(self.longest, *rows)
        if self.rows is None:
            self.most = max(self.most or 0, most)

    def capacity(self, local: int, alignment: int) -> tuple[int, int]:
        """Rows of an operand, with the padding of the groups, and the most rows of the tokens of a rank."""
        capacity = plan.capacity_of(self.most or 0, local, alignment)
        if capacity >= 2**31:
            got, allowed = f"{self.most}, with padding {capacity}", f"allowed: {2**31 - 1} with padding"
            fail(ValueError, OP, "rows", got, allowed)
        return capacity, max(capacity, self.longest)

    def allocate(self, experts: int, sizes: Sequence[int]) -> None:
        """Memory for counts, and for these bytes of rows to experts and of rows to tokens. A collective if there is
        less."""
        if lacks := self._lacks(experts, sizes):
            self._grow(lacks)

    def _lacks(self, experts: int, sizes: Sequence[int]) -> list[int]:
        """The sizes of memory for both these and what it has; none if it has enough."""
        needs = [-(-4 * experts * self.ranks // ALIGNMENT) * ALIGNMENT, *sizes]
        has = [0] * 3 if self.buffer is None else [end - start for start, end in pairwise(self.buffer.starts)]
        both = [max(need, size) for need, size in zip(needs, has, strict=True)]
        return [] if both == has else both

    def _compare(self, op: str, shared: Mapping[str, Any]) -> None:
        if self.interrupted and torch.cuda.is_available():
            torch.cuda.synchronize()  # with the comparison: nobody reads what the next call writes
        compare_calls(op, shared, self.group.group_name, None)
        self.compared.add(key_of(shared))
        self.interrupted = False

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Around the work between two barriers. After an error there the next call begins with a comparison on the
        host, where the ranks wait for each other: all have failed alike, or the time limit ends them."""
        try:
            yield
        except Exception:
            self.interrupt()
            raise

    def interrupt(self) -> None:
        self.interrupted = True
        self.compared.clear()

    def _grow(self, sizes: Sequence[int]) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # with the barrier: nobody uses the old memory any more
        dist.barrier(self.group)
        starts = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
        with self._on_device():
            shared = shared_memory(starts[-1], self.group)
        addresses = [of.data_ptr() for of in shared.of_rank]
        self.buffer = MappedBuffer(shared, torch.tensor(addresses, dtype=torch.int64, device=self.device), starts)

    @property
    def side_stream(self) -> int:
        """The address of the stream of pulls and pushes."""
        return 0 if self.side is None else self.side.cuda_stream

    @property
    def own(self) -> Tensor:
        """This rank's memory, uint8."""
        assert self.buffer is not None
        return self.buffer.shared.of_rank[self.rank]

    def counts(self, experts: int) -> Tensor:
        """(ranks, E) int32, of every rank."""
        return self.own[: 4 * experts * self.ranks].view(torch.int32).view(self.ranks, experts)

    def starts(self, where: Where, capacity: int, parts: Sequence[Part]) -> list[int]:
        """The first byte of each part of a transfer of `capacity` rows, in the memory of every rank."""
        assert self.buffer is not None
        first = self.buffer.starts[1 + WHERE.index(where)]
        return [first + at for at in offsets_of(capacity, parts)[:-1]]

    def views(self, where: Where, capacity: int, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """The parts of a transfer in this rank's memory."""
        assert self.buffer is not None
        return views_of(self.own[self.buffer.starts[1 + WHERE.index(where)] :], capacity, parts)

    def holds(self, x: Tensor) -> bool:
        """Whether x is in this memory."""
        return x.untyped_storage().data_ptr() == self.own.untyped_storage().data_ptr()

    def barrier(self) -> None:
        """Work that the current stream gets from now on starts when all ranks have ended theirs before this call."""
        assert self.buffer is not None
        barrier(self.buffer.shared, self.timeout_ms)

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def launch(self, kernel: str, programs: int, *args: Any, **constexprs: Any) -> None:
        """Start a kernel of core_kernels/peer on the current stream."""
        if programs:
            with self._on_device():
                function = getattr(self.kernels, f"{kernel}_kernel")
                function[(programs,)](*args, **constexprs, enable_fp_fusion=False)


def _find_group(group: "str | dist.ProcessGroup | None") -> dist.ProcessGroup:
    """The process group; raises TypeError and ValueError if there is none."""
    name = name_of(OP, "group", group)
    if not name:
        fail(ValueError, OP, "group", repr(group), "allowed: a process group; call init_process_group before")
    return group_named(name)


def _to_milliseconds(timeout: timedelta) -> int:
    """The limit of a wait on a GPU; raises ValueError unless it is a timedelta of a millisecond or more."""
    if not isinstance(timeout, timedelta) or timeout < timedelta(milliseconds=1):
        fail(ValueError, OP, "timeout", repr(timeout), "allowed: a timedelta of a millisecond or more")
    return int(timeout / timedelta(milliseconds=1))


def _missing() -> str:
    """What this process lacks for memory of peers."""
    if not has_shared_memory:
        return "a torch without torch.distributed._symmetric_memory"
    return "" if torch.cuda.is_available() else "no CUDA"


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
