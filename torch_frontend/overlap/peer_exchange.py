"""Rows to the memory of peers and back, by Triton's kernels of core_kernels/peer.

    tokens --push--> operand of the experts' ranks | tokens <--pull, sum-- rows in the memory of the experts' ranks

A token is quantized once, and a kernel writes its bytes to the final row of each of its replicas, in the memory of the
expert's rank. The operand is as long as the capacity of the memory; the end of each group is on the device.
peer_experts.py has the order of the steps.
"""

from collections.abc import Sequence
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
    """Rows of one call. inverse, top_k: of TokenReplicas, or None and 1."""

    def __init__(self, memory: "PeerMemory", layout: Layout, rows: Tensor | TokenReplicas) -> None:
        self.memory, self.layout = memory, layout
        self.inverse, self.top_k = None, 1
        if isinstance(rows, TokenReplicas):
            self.inverse, self.top_k = rows.inverse, rows.top_k

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
        memory, device, tokens, mx = self.memory, self.layout.positions.device, self.tokens, rows.rounding is not None
        y = torch.empty((tokens, rows.width), dtype=out, device=device)
        starts = [*memory.starts("tokens", self.layout.capacity, parts), 0]
        hw_cast = device.type == "cuda" and facts(arch_of(device)).hw_cast
        replicas, wide, maps = self.inverse is not None, rows.dtype == torch.float32, self._maps()
        memory.launch(
            "pull", min(tokens, memory.width), maps.inverse, maps.positions, maps.addresses, tokens, starts[0],
            starts[1] if mx else 0, y,
            **plan.pull(rows.width, self.top_k, replicas, mx, wide, hw_cast, drop=memory.on_overflow == "drop"),
        )  # fmt: skip
        return y

    def pull_weights(self, parts: Sequence[Part]) -> Tensor:
        """(T, top_k) fp32, the last part of each replica's row."""
        out = torch.empty((self.tokens, self.top_k), dtype=torch.float32, device=self.layout.positions.device)
        start = self.memory.starts("tokens", self.layout.capacity, parts)[-1]
        maps, slots = self._maps(), out.numel()
        self.memory.launch(
            "pull_weights", -(-slots // 256), maps.inverse, maps.positions, maps.addresses, slots, start, out,
            **plan.pull_weights(drop=self.memory.on_overflow == "drop"),
        )  # fmt: skip
        return out

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


def lay_out(memory: "PeerMemory", counts: Tensor, rows: int, capacity: int, alignment: int) -> Layout:
    """Exchange the counts (E,) of all ranks and place the rows of this one; ends with the first barrier of a call."""
    experts, device, buffer = counts.shape[0], counts.device, memory.buffer
    assert buffer is not None
    counts = counts.to(torch.int32).contiguous()
    memory.launch(
        "share_counts", memory.ranks, counts, buffer.addresses, memory.rank, buffer.starts[0],
        **plan.share_counts(experts),
    )  # fmt: skip
    memory.barrier()
    groups = experts // memory.ranks
    ends, filled, totals = (torch.empty(n, dtype=torch.int32, device=device) for n in (groups, groups, experts))
    positions = torch.empty(rows, dtype=torch.int64, device=device)
    blocks = plan.lay_out(experts, memory.ranks, alignment)
    memory.launch(
        "lay_out", experts, memory.counts(experts), memory.rank, rows, capacity, positions, ends, filled, totals,
        memory.worst,
        **blocks,
    )  # fmt: skip
    return Layout(positions, ends, filled, totals, capacity)


def _aligned(x: Tensor) -> Tensor:
    """x with dense rows at an address that kernels take."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
