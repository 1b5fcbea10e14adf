"""Memory of the GPUs of one host that kernels of all of them write and read: exchanges for which the host computes no
offset. It reads the counts of all ranks where a call may have several rounds (rounds.py), else no size.

    PeerMemory.reserve --> RankRows: this rank's part of mapped memory for one call (rank_rows.py, mapped_memory.py)
                             |-- device_exchange.py    the exchange overlaps with the products of the programs
                             '-- peer_experts.py       all other calls: pull, products, push
"""

import logging
import math
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ... import cpp_bindings
from ...core_kernels.launch import fail, require_choice
from ...core_kernels.peer.programs.rows import LONGEST_ROW
from ...core_kernels.policy.overflow import OnOverflowOfPeers
from ...core_kernels.policy.rounds import CAPACITY_FACTOR, capacity_of
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request, checked_rows, shared_arguments
from ..exchange.process_groups import can_compare, compare_calls, name_of, table_of_ranks
from ..exchange.shards import Ranks
from ..ops.checks import check_int, check_positive
from ..ops.device import compute_capability
from ..ops.launch import check_devices
from ..ops.private import exchange, group_named
from .mapped_memory import MappedMemory, is_capturing
from .rank_rows import RankRows
from .symmetric import has_shared_memory

OP = "PeerMemory"
TIMEOUT = timedelta(minutes=10)
LOG = logging.getLogger(__name__)


class PeerMemory:
    """The memory that the GPUs of one host, a process each, map for exchanges between them.

    A rank has a capacity: the rows from all ranks that it takes at a time. If the counts say that some rank gets more,
    the call has several rounds, on all ranks, and no row is lost. A round takes whole experts, in their order, while
    they fit. An expert is split if a round of its own is too short for its rows. Outputs and the gradients of rows and
    probabilities have the bytes of one round, and so have the weight gradients of an expert that is not split. A split
    expert's weight gradients are a sum over its rounds, in the dtype of the weights. Only the first round saves its
    state: the backward repeats the forward of the others, from the rows.

    The host reads the counts once per forward, after it has launched the first round, so that the GPU does not wait.
    The backward reads nothing. A CUDA graph cannot read them: it takes on_overflow="nan" or "drop", which have one
    round. A graph of empty rounds would launch about 80 kernels for each, forward and backward, in every step.

    On every GPU the memory holds the rows of its tokens and the results for them, as many as the capacity with the
    padding of the groups. It is allocated when a call needs more than any before, never while a graph is captured; all
    ranks then wait for each other once. GEMMs, their operands and saved tensors are as long as the capacity.

    On Hopper feed-forwards and products of recipe "mxfp8" overlap with their exchange, at the sizes in
    docs/guides/overlap.md. Other calls send rows before and after their GEMMs. A row has at most 48 KiB.

    Calls share the memory in their order, which must be one on all ranks. Ranks compare their arguments in the first
    call with them, and in the first one after an error. Layers that run on two streams at a time take
    one each. Layers with prob_in="combine" raise: their backward reads rows that this memory does not keep.

    Args:
        group: a process group or its name, of at least two ranks; None is the default group.
        rows: the capacity of a rank, in rows from all ranks together.
        capacity_factor: the capacity of a rank, relative to the mean rows of a rank; not with `rows`. At most what a
            rank can get: all tokens, each min(top_k, local experts) times. With rounds the call with the most rows so
            far sets it, else the first call. None without `rows`: 1.25 with rounds, else what a rank can get if each
            rank has as many tokens as the longest one in the first call.
        on_overflow: what rows beyond the capacity become. "rounds": rows of another round. With the others the host
            reads nothing, a CUDA graph can capture the layers, and `overflow` raises on all ranks. "nan": outputs and
            gradients of their tokens are NaN. "drop": such a row is zero in the sum of its token, and so are its
            gradients.
        timeout: how long a GPU waits for the other ranks; then it ends this process with an error of CUDA.

    Raises:
        NotImplementedError: without CUDA or torch's symmetric memory, or on a GPU for which this build has no CUDA
            kernels: they have machine code for Hopper and Blackwell (9.0 and 10.0).
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
        on_overflow: OnOverflowOfPeers = "rounds",
        timeout: timedelta = TIMEOUT,
    ) -> None:
        timeout_ms = _check_options(rows, capacity_factor, on_overflow, timeout)
        if got := _missing():
            fail(NotImplementedError, OP, "group", got, "allowed: GPUs of one host; other groups take no transport")
        self.group = _find_group(group)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self.rounds = on_overflow == "rounds"
        if self.rounds and rows is None and capacity_factor is None:
            capacity_factor = CAPACITY_FACTOR
        self.rows, self.capacity_factor, self.on_overflow = rows, capacity_factor, on_overflow
        hosts: list[Any] = [None] * self.ranks
        dist.all_gather_object(hosts, socket.gethostname(), group=self.group)
        if len(set(hosts)) > 1:
            fail(ValueError, OP, "group", f"ranks on {sorted(set(hosts))}", "allowed: one host; else no transport")
        self.device = _device()
        self.mapped = MappedMemory(self.group, self.device, timeout_ms)
        self.worst = torch.zeros((self.ranks, 2), dtype=torch.int32, device=self.device)
        self.most = rows
        self.longest = 0
        self.side = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        self.programs: dict[Any, Any] = {}

    @classmethod
    def choose(
        cls,
        group: "str | dist.ProcessGroup | None" = None,
        rows: int | None = None,
        *,
        capacity_factor: float | None = None,
        on_overflow: OnOverflowOfPeers = "rounds",
        timeout: timedelta = TIMEOUT,
    ) -> "PeerMemory | None":
        """Make a `PeerMemory` where it works, for scripts that run on one GPU host, on several and on CPUs.

        All ranks of the group call it, for layers on their GPUs, and get the same answer. A sentence in the log of
        `mxep` says which exchange runs: on GPUs without `PeerMemory` a warning.

        Args:
            group: a process group or its name; None is the default group.
            rows: as of `PeerMemory`, and so are the arguments after it.
            capacity_factor: the capacity of a rank, relative to the mean rows of a rank.
            on_overflow: "rounds", "nan" or "drop". The all-to-all loses no row.
            timeout: how long a GPU waits for the other ranks.

        Returns:
            A `PeerMemory` for two or more GPUs of one host; else None, the all-to-all of the group.

        Raises:
            ValueError: without a process group; for values that `PeerMemory` refuses.
            TypeError: for values of another type.

        Example:
            >>> def parallelized(moe, mesh):  # under torchrun
            ...     style = ExpertParallel(transport=PeerMemory.choose(mesh.get_group()))
            ...     return parallelize_module(moe, mesh, style)
        """
        _check_options(rows, capacity_factor, on_overflow, timeout)
        found = _find_group(group)
        ranks: list[Any] = [None] * found.size()
        dist.all_gather_object(ranks, (socket.gethostname(), _missing(found)), group=found)
        if reason := _find_obstacle(ranks):
            level = logging.WARNING if torch.cuda.is_available() and len(ranks) > 1 else logging.INFO
            LOG.log(level, "PeerMemory.choose: %s: experts get their rows by all-to-all", reason)
            return None
        LOG.info("PeerMemory.choose: experts get their rows through PeerMemory of %d GPUs", len(ranks))
        return cls(found, rows, capacity_factor=capacity_factor, on_overflow=on_overflow, timeout=timeout)

    @property
    def config_key(self) -> str:
        options = f"rows={self.rows}, capacity_factor={self.capacity_factor}, on_overflow={self.on_overflow!r}"
        return f"PeerMemory({options})"

    def reserve(self, request: Request, overlaps: bool, row_bytes: int, slot_bytes: int) -> RankRows:
        """This rank's part of a call, with memory for it. row_bytes, slot_bytes: of the longest row to the experts, and
        to the tokens. Raises the error of the request."""
        op, mapped = "dispatch", self.mapped
        if self.rounds and is_capturing():
            hint = "state PeerMemory(on_overflow='nan'): the host reads how many rounds a call has"
            fail(RuntimeError, op, "transport", "on_overflow='rounds' in a CUDA graph", hint=hint)
        if request.error is not None:
            self.raise_error(request.error, request.ranks)
        try:
            _check_length(request.op, max(row_bytes, slot_bytes))
            rows, num_rows = checked_rows(request)
            check_devices(op, "transport", self.device, rows=request.x)
            # A rank divides the slots of other ranks by its own top_k: all need the same.
            also = {"top_k": _top_k(rows), "overlaps": overlaps}
            also = {"experts": request.counts.shape[0], **request.also, **also}
            shared = shared_arguments(request._replace(also=also))
        except (TypeError, ValueError) as error:
            self.raise_error(error, request.ranks)
        top_k, experts, alignment = _top_k(rows), request.counts.shape[0], request.recipe.alignment
        replicas, tokens = isinstance(rows, TokenReplicas), num_rows // top_k
        with torch.no_grad(), mapped.uninterrupted():
            new, capturing = mapped.is_new(shared), is_capturing()
            if new and not capturing:
                mapped.compare(op, shared)
            if self.most is None and not capturing:
                to_one_rank = tokens * min(top_k, experts // self.ranks)
                table = table_of_ranks(op, [num_rows, to_one_rank], self.group.group_name)
                all_rows, to_one_rank = zip(*table, strict=True)
                self.note_rows(all_rows, max(to_one_rank))
            capacity, room = self.capacity(experts // self.ranks, alignment)
            found = RankRows(
                self, tokens, top_k, replicas, experts // self.ranks, alignment, row_bytes, slot_bytes, capacity, room
            )
            mapped.reserve(op, experts, found.nbytes, None if new else shared)
        if num_rows > room and not self.rounds:
            mapped.interrupt()
            allowed = f"allowed: {room}, the capacity with padding; state more `rows` or a larger `capacity_factor`"
            fail(ValueError, OP, "rows", f"{num_rows} rows of rank {self.rank}", allowed)
        return found

    def raise_error(self, error: Exception, ranks: Ranks) -> NoReturn:
        """Raise what this rank finds before it shares its counts. The others compare their arguments before they first
        allocate, and raise then too."""
        self.mapped.interrupt()
        if self.mapped.buffer is None and can_compare(ranks.group_name):
            compare_calls("dispatch", {}, ranks.group_name, error)
        raise error

    def send_error_sentinel(self, ranks: Ranks) -> None:
        """There is no exchange that tells the others: they wait for this rank until their time limit."""
        self.mapped.interrupt()

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
        capacity = capacity_of(self.most or 0, local, alignment)
        if capacity >= 2**31:
            got, allowed = f"{self.most}, with padding {capacity}", f"allowed: {2**31 - 1} with padding"
            fail(ValueError, OP, "rows", got, allowed)
        return capacity, max(capacity, self.longest)

    @property
    def side_stream(self) -> int:
        """The address of the stream of pulls and pushes that overlap."""
        return 0 if self.side is None else self.side.cuda_stream


def _top_k(rows: Tensor | TokenReplicas) -> int:
    return rows.top_k if isinstance(rows, TokenReplicas) else 1


def _check_length(op: str, nbytes: int) -> None:
    """Raise ValueError for rows that are too long for the shared memory of a multiprocessor."""
    if nbytes > LONGEST_ROW:
        fail(ValueError, op, "rows", f"rows of {nbytes} bytes", f"allowed: {LONGEST_ROW} bytes with PeerMemory")


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


def _check_options(rows: Any, capacity_factor: Any, on_overflow: Any, timeout: Any) -> int:
    """The limit of a wait in milliseconds; raises TypeError and ValueError for values that are not allowed."""
    if rows is not None:
        check_int(OP, "rows", rows, 1)
    if capacity_factor is not None:
        check_positive(OP, "capacity_factor", capacity_factor)
        if rows is not None:
            fail(ValueError, OP, "capacity_factor", f"{capacity_factor} and rows={rows}", "allowed: one of the two")
    require_choice(OP, "on_overflow", on_overflow, get_args(OnOverflowOfPeers))
    return _to_milliseconds(timeout)


def _find_obstacle(ranks: Sequence[tuple[str, str]]) -> str:
    """Why these ranks have no PeerMemory, "" if they have. ranks: the host of each, and what it lacks."""
    hosts = sorted({host for host, _ in ranks})
    if len(ranks) == 1:
        return "one rank"
    if len(hosts) > 1:
        return f"ranks on {', '.join(hosts)}"
    return next((f"rank {rank} has {missing}" for rank, (_, missing) in enumerate(ranks) if missing), "")


def _missing(group: dist.ProcessGroup | None = None) -> str:
    """What this process lacks for memory of peers. group: of the GPUs that are meant, if any are."""
    if not has_shared_memory:
        return "a torch without torch.distributed._symmetric_memory"
    if not torch.cuda.is_available():
        return "no CUDA"
    if exchange is None:
        return "a torch.Tensor without __dlpack_c_exchange_api__"
    major, minor = capability = compute_capability(_device())
    return "" if capability in cpp_bindings.cuda_archs else f"a build without CUDA kernels for sm_{major}{minor}"


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
