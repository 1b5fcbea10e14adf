"""Rows to the memory of peers and back, by Triton's kernels of core_kernels/peer.

    tokens --push--> operand of the experts' ranks | tokens <--pull, sum-- rows in the memory of the experts' ranks

A token is quantized once, and a kernel writes its bytes to the final row of each of its replicas, in the memory of the
expert's rank. The operand is as long as the capacity of the memory; the end of each group is on the device.
peer_experts.py has the order of the steps.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.dispatch import facts
from ...core_kernels.peer import plan
from ..exchange.all_to_all import TokenReplicas
from ..ops import direct as ops
from ..ops.device import arch_of
from ..ops.mx_tensor import MXTensor
from ..products.gathered_weights import GatheredWeights
from ..routing.weighted_combine import sum_slots
from .rounds import Later
from .rows import PROB, Part, Rows

if TYPE_CHECKING:
    from .peer_memory import PeerMemory


class Layout(NamedTuple):
    """Of one call. positions (M,) int64: rank << 32 | row of each row of this rank, -1 if it is not sent. group_ends,
    filled_ends (local experts,) int32: the ends of this rank's groups, with and without padding. totals (E,) int32:
    rows of all ranks. capacity: rows of an operand."""

    positions: Tensor
    group_ends: Tensor
    filled_ends: Tensor
    totals: Tensor
    capacity: int


class _Maps(NamedTuple):
    """Arguments of each kernel that reads or writes rows of peers. inverse (T top_k,): the row of each replica; the
    positions, which nothing reads, where rows are no replicas. addresses (ranks,) int64: of each rank's memory."""

    inverse: Tensor
    positions: Tensor
    addresses: Tensor


class PeerExchange:
    """Rows of one call, or of a round. inverse, top_k: of TokenReplicas, or None and 1. later: the other rounds."""

    def __init__(
        self, memory: "PeerMemory", layout: Layout, rows: Tensor | TokenReplicas, later: Sequence[Later] = ()
    ) -> None:
        self.memory, self.layout, self.later = memory, layout, later
        self.inverse, self.top_k = None, 1
        if isinstance(rows, TokenReplicas):
            self.inverse, self.top_k = rows.inverse, rows.top_k

    def round(self, of: Later, alignment: int) -> "PeerExchange":
        """A later round: all rows of the call, of which the rows of other rounds have no position."""
        layout = lay_out(self.memory, of.counts, len(of.rows), self.layout.capacity, alignment)
        positions = torch.full_like(self.layout.positions, -1)
        positions[of.rows] = layout.positions
        found = copy(self)
        found.layout = layout._replace(positions=positions)
        return found

    def push(self, x: Tensor, rows: Rows, weights: Tensor | None) -> tuple[Tensor | MXTensor, Tensor | None]:
        """Write rows (T, K) to their offsets on all ranks, and weights (T, top_k) with the rows. Returns this rank's
        operand and the weights of its rows, which are complete after the next barrier."""
        memory, at = self.memory, self.layout
        parts = rows.parts + [PROB] * (weights is not None)
        starts = [*memory.starts("experts", at.capacity, parts), 0, 0]
        buffer = memory.views("experts", at.capacity, parts)
        weights_at = starts[len(parts) - 1] if weights is not None else 0
        scales = own_scales = x.new_empty(0, dtype=torch.uint8)
        word, per_row, scales_at = "uint8", 0, 0
        if rows.rounding is None:
            values = _aligned(x)
        else:
            values, scales = ops.quantize_row(x.contiguous(), rows.rounding)
            word, per_row = plan.words_of(scales.shape[1])
            scales, own_scales = (s.view(getattr(torch, word)) for s in (scales, buffer[1]))
            scales_at = starts[1]
        values, own_values = values.view(torch.int64), buffer[0].view(torch.int64)
        prob = own_prob = x.new_empty(0, dtype=torch.float32)
        if weights is not None:
            prob, own_prob = weights.contiguous(), buffer[-1]
        replicas, weighted, maps = self.inverse is not None, weights is not None, self._maps()
        memory.launch(
            "push", min(x.shape[0], memory.width), values, scales, prob, maps.inverse, maps.positions,
            maps.addresses, x.shape[0], starts[0], scales_at, weights_at,
            **plan.push(values.shape[1], per_row, scales.element_size(), self.top_k, replicas, weighted),
        )  # fmt: skip
        memory.launch(
            "clear", at.capacity // plan.BLOCK, at.group_ends, at.filled_ends, own_values, own_scales, own_prob,
            **plan.clear(values.shape[1], per_row, at.group_ends.shape[0], weighted),
        )  # fmt: skip
        operand = MXTensor(buffer[0], buffer[1], x.dtype) if rows.rounding is not None else buffer[0]
        return operand, buffer[-1].squeeze(1) if weights is not None else None

    def pull(self, rows: Rows, parts: Sequence[Part], out: torch.dtype) -> Tensor:
        """(T, width) of dtype `out`: the sum of each token's replicas, rows in the memory of their ranks, or the row.
        parts: of the rows, and further parts sent with the rows."""
        return self._pull(rows, parts, out, self.inverse is not None)

    def pull_slots(self, rows: Rows, parts: Sequence[Part], found: Tensor | None) -> Tensor:
        """(M, width), each row as its sum would read it. found: rows of the rounds before this one."""
        new = self._pull(rows, parts, rows.dtype, False)
        return new if found is None else torch.where(self._served()[:, None], new, found)

    def sum_slots(self, rows: Tensor, out: torch.dtype) -> Tensor:
        """As `pull`, of rows that are here."""
        if self.inverse is None:
            return rows.to(out)
        return sum_slots(rows, self.inverse.view(-1, self.top_k), out)

    def _served(self) -> Tensor:
        """(M,) whether this round has the row."""
        return self.layout.positions >= 0

    def _pull(self, rows: Rows, parts: Sequence[Part], out: torch.dtype, replicas: bool) -> Tensor:
        memory, device, mx = self.memory, self.layout.positions.device, rows.rounding is not None
        tokens = self.tokens if replicas else self.layout.positions.shape[0]
        y = torch.empty((tokens, rows.width), dtype=out, device=device)
        starts = [*memory.starts("tokens", self.layout.capacity, parts), 0]
        hw_cast = device.type == "cuda" and facts(arch_of(device)).hw_cast
        wide, maps = rows.dtype == torch.float32, self._maps()
        memory.launch(
            "pull", min(tokens, memory.width), maps.inverse, maps.positions, maps.addresses, tokens, starts[0],
            starts[1] if mx else 0, y,
            **plan.pull(
                rows.width, self.top_k if replicas else 1, replicas, mx, wide, hw_cast,
                drop=memory.on_overflow == "drop",
            ),
        )  # fmt: skip
        return y

    def pull_weights(self, parts: Sequence[Part], found: Tensor | None = None) -> Tensor:
        """(T, top_k) fp32, the last part of each replica's row. found: numbers of the rounds before this one."""
        out = torch.empty((self.tokens, self.top_k), dtype=torch.float32, device=self.layout.positions.device)
        start = self.memory.starts("tokens", self.layout.capacity, parts)[-1]
        maps, slots = self._maps(), out.numel()
        self.memory.launch(
            "pull_weights", -(-slots // 256), maps.inverse, maps.positions, maps.addresses, slots, start, out,
            **plan.pull_weights(drop=self.memory.on_overflow == "drop"),
        )  # fmt: skip
        return out if found is None else torch.where(self._served()[maps.inverse.long()].view_as(out), out, found)

    @property
    def tokens(self) -> int:
        maps = self.layout.positions if self.inverse is None else self.inverse
        return maps.shape[0] // self.top_k

    def _maps(self) -> _Maps:
        buffer, positions = self.memory.buffer, self.layout.positions
        assert buffer is not None
        return _Maps(positions if self.inverse is None else self.inverse, positions, buffer.addresses)

    def views_home(self, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """This rank's memory for the rows of its experts, which the ranks of the tokens pull."""
        return self.memory.views("tokens", self.layout.capacity, parts)

    def clone_if_in_buffer(self, value: Any) -> Any:
        """What the backward reads, with memory of its own."""
        if isinstance(value, MXTensor):
            return MXTensor(self.clone_if_in_buffer(value.q), self.clone_if_in_buffer(value.sf), value.orig_dtype)
        if isinstance(value, tuple):
            items = map(self.clone_if_in_buffer, value)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not isinstance(value, Tensor) or isinstance(value, GatheredWeights):
            return value
        return value.clone() if self.memory.holds(value) else value


def share_counts(memory: "PeerMemory", counts: Tensor) -> Tensor:
    """(ranks, E) int32, in memory that the next call writes: the counts (E,) of all ranks; ends with the first barrier
    of a call."""
    buffer, experts = memory.buffer, counts.shape[0]
    assert buffer is not None
    memory.launch(
        "share_counts", memory.ranks, counts.to(torch.int32).contiguous(), buffer.addresses, memory.rank,
        buffer.starts[0],
        **plan.share_counts(experts),
    )  # fmt: skip
    memory.barrier()
    return memory.counts(experts)


def lay_out(memory: "PeerMemory", counts: Tensor, rows: int, capacity: int, alignment: int) -> Layout:
    """Place the rows of this rank. counts: (ranks, E) int32."""
    experts, device = counts.shape[1], counts.device
    groups = experts // memory.ranks
    ends, filled, totals = (torch.empty(n, dtype=torch.int32, device=device) for n in (groups, groups, experts))
    positions = torch.empty(rows, dtype=torch.int64, device=device)
    memory.launch(
        "lay_out", experts, counts, memory.rank, rows, capacity, positions, ends, filled, totals, memory.worst,
        **plan.lay_out(experts, memory.ranks, alignment, memory.rounds),
    )  # fmt: skip
    return Layout(positions, ends, filled, totals, capacity)


def _aligned(x: Tensor) -> Tensor:
    """x with dense rows at an address that kernels take."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
