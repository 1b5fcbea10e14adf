"""Rows are sent to offsets that the host plans: the ranks exchange their counts, and a transport sends the rows.

    forward     agree on counts | quantize weights, rows | host waits for the counts, plans | send to experts, tokens
    backward                      rows of the gradients                                     | send to experts, tokens

`core_kernels/policy/exchange.py` makes the plan, which the backward uses again. transport.py has the protocol of
transfers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...core_kernels.policy.exchange import Chunk, Exchange, plan_exchange
from ...core_kernels.registry import OPS
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request, counts_of_ranks
from ..ops import direct as ops
from ..ops.call import call_out
from ..ops.launch import dtype_name
from ..ops.private import group_named
from ..routing.weighted_combine import sum_slots
from .schedule import BF16, Rows
from .symmetric import zero_each
from .transport import Part, PlannedTransport, Transfer

PROB = Part(1, torch.float32)


class PlannedExchange:
    """One call: a `RowExchange`. It agrees on the counts; raises the error of this rank."""

    def __init__(self, transport: PlannedTransport, request: Request) -> None:
        self.agreed, self.table = counts_of_ranks(request)
        rows = self.agreed.rows
        self.transport, self.alignment = transport, request.recipe.alignment
        self.rank = group_named(request.ranks.group_name).rank()
        self.order, self.slots = None, None
        self.top_k, self.device = 0, request.counts.device
        if isinstance(rows, TokenReplicas):
            self.order, self.slots, self.top_k = rows.order, rows.inverse.view(-1, rows.top_k), rows.top_k
        self.plan: Exchange | None = None

    @property
    def totals(self) -> Tensor:
        return self.agreed.totals

    @contextmanager
    def forward(self, x: Tensor, weights: Tensor | None, there: Rows, home: Rows) -> Iterator["_Pass"]:
        with _abandon_on_error() as transfers:
            yield _Pass(self, transfers, there, home, home.parts, lambda: self._leaving(x, there, weights))

    @contextmanager
    def backward(
        self, dy: Tensor, weighted: tuple[Tensor, Tensor] | None, there: Rows, home: Rows, needs: tuple[bool, bool]
    ) -> Iterator["_Pass"]:
        need_x, need_prob = needs
        parts = home.parts * need_x + [PROB] * need_prob
        with _abandon_on_error() as transfers:
            if weighted is None:
                leaving, dprobs = self._leaving(dy.to(BF16), there, None), None
            else:
                leaving, dprobs = self._weighted(dy, weighted, there)
            del dy, weighted
            exchange_pass = _Pass(self, transfers, there, home, parts, lambda: leaving, dprobs)
            exchange_pass.depart()
            yield exchange_pass

    def planned(self, leaving: Sequence[Tensor]) -> Exchange:
        """The host waits for the counts, in the forward."""
        if self.plan is None:
            row_bytes = sum(part.shape[1] * part.dtype.itemsize for part in leaving)
            least_rows = max(self.transport.chunk_bytes // row_bytes, 1)
            self.plan = plan_exchange(self.table(), self.rank, self.alignment, least_rows)
        return self.plan

    def _leaving(self, x: Tensor, rows: Rows, weights: Tensor | None) -> tuple[Tensor, ...]:
        """The parts of the rows sent to the experts, of tokens or of rows, and of their weights (T, top_k), if weights
        are sent too."""
        x, parts = x.contiguous(), rows.parts
        if self.order is None:
            if rows.rounding is None and rows.dtype == x.dtype:
                return (x,)
            buffer = self._send_buffer(x.shape[0], parts)
            rows.write(x, buffer)
            return buffer
        token = torch.div(self.order, self.top_k, rounding_mode="floor")
        buffer = self._send_buffer(self.order.shape[0], parts if weights is None else [*parts, PROB])
        if rows.rounding is not None:
            call_out(buffer[:2], OPS["permute_mx"], ops.quantize_row_packed(x, rows.rounding), token)
        else:
            call_out(buffer[:1], OPS["permute_rows"], x, token)
        if weights is not None:
            call_out(buffer[-1:], OPS["permute_rows"], weights.contiguous().view(-1, 1), self.order)
        return buffer

    def _weighted(self, dy: Tensor, weighted: tuple[Tensor, Tensor], rows: Rows) -> tuple[tuple[Tensor, ...], Tensor]:
        """The parts of the gradient's rows, and the gradient of the weights of the sum. weighted: the rows that were
        summed, and their weights."""
        (home, probs), slots, order = weighted, self.slots, self.order
        assert order is not None
        assert slots is not None
        buffer = self._send_buffer(order.shape[0], rows.parts)
        if rows.rounding is None:
            *parts, dprobs = call_out(buffer, OPS["combine_bwd"], dy, home, slots, order, probs)
        else:
            op = OPS["combine_bwd_row"]
            *parts, dprobs = call_out(buffer, op, dy, home, slots, order, probs, rounding=rows.rounding)
        return tuple(parts), dprobs

    def _send_buffer(self, rows: int, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """The send buffer for the rows of this rank to the experts."""
        return self.transport.outgoing("experts", rows, parts, self.device)


class _Pass:
    """`transfers`: the open transfers, to which the pass adds its own. parts: of the rows sent back; without parts no
    row is sent back. leaving: makes the sent parts. dprobs: the gradient of the weights of a sum."""

    def __init__(
        self, of: PlannedExchange, transfers: list[Transfer], there: Rows, home: Rows, parts: list[Part],
        leaving: Callable[[], tuple[Tensor, ...]], dprobs: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.of, self.transfers, self.of_there, self.of_home = of, transfers, there, home
        self.parts, self.leaving, self.dprobs = parts, leaving, dprobs
        self.chunks: tuple[Chunk, ...] = ()
        self.back: Transfer | None = None

    def depart(self) -> None:
        """Open the transfers, clear the padding of the groups and send every chunk."""
        of, leaving = self.of, self.leaving()
        plan, transport = of.planned(leaving), of.transport
        self.plan, self.chunks = plan, plan.chunks
        self.there = transport.open_transfer("experts", plan.to_experts, plan.token_rows, plan.operand_rows, leaving)
        self.transfers.append(self.there)
        padding = [part[start:end] for part in self.there.received for start, end in plan.padding]
        if padding:
            zero_each(padding)
        self.there.send(range(len(plan.chunks)))
        if self.parts:
            buffer = transport.outgoing("tokens", plan.operand_rows[of.rank], self.parts, of.device)
            self.back = transport.open_transfer("tokens", plan.to_tokens, plan.operand_rows, plan.token_rows, buffer)
            self.transfers.append(self.back)

    def ends(self) -> list[Tensor]:
        return ends_of_chunks(self.plan, self.of.device)

    def operands(self, chunk: int) -> tuple[Tensor, Tensor | None]:
        self.there.wait(chunk)
        rows = slice(self.chunks[chunk].start, self.chunks[chunk].end)
        parts = [part[rows] for part in self.there.received]
        others = parts[len(self.of_there.parts) :]
        return self.of_there.operand(parts), others[0].squeeze(1) if others else None

    def return_buffer(self, chunk: int) -> tuple[Tensor, ...]:
        rows = slice(self.chunks[chunk].start, self.chunks[chunk].end)
        return () if self.back is None else tuple(part[rows] for part in self.back.outgoing)

    def clone_if_in_buffer(self, state: tuple) -> tuple:
        return state

    def send_back(self, chunk: int) -> None:
        if self.back is not None:
            self.back.send(range(chunk, chunk + 1))

    def sums(self, out_dtype: torch.dtype, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, _ = self._home()
        if self.of.slots is None:
            return rows.to(out_dtype), rows
        if weights is None:
            return sum_slots(rows, self.of.slots, out_dtype), rows
        return ops.combine(rows, self.of.slots, weights, dtype_name(out_dtype)), rows

    def gradients(
        self, needs: tuple[bool, bool], beside: Callable[[], list[Tensor | None]]
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        weights, dx, dprobs, (need_x, need_prob) = beside(), None, self.dprobs, needs
        if self.back is None:
            return None, dprobs, weights
        rows, others = self._home() if need_x else (None, self._arrived())
        slots = self.of.slots
        if rows is not None:
            dx = rows if slots is None else sum_slots(rows, slots, rows.dtype)
        if need_prob:
            assert slots is not None
            dprobs = ops.permute_rows(others[0], slots.view(-1)).view(slots.shape)
        return dx, dprobs, weights

    def _arrived(self) -> tuple[Tensor, ...]:
        """The parts sent back, after all are received."""
        assert self.back is not None
        for chunk in range(len(self.chunks)):
            self.back.wait(chunk)
        return self.back.received

    def _home(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The rows sent back, dequantized, and the parts sent with them."""
        parts, rows = self._arrived(), self.of_home
        others = parts[len(rows.parts) :]
        if rows.rounding is None:
            return parts[0], others
        q, sf = parts[:2]
        return ops.dequantize(q, sf, dtype_name(rows.dtype)), others


@contextmanager
def _abandon_on_error() -> Iterator[list[Transfer]]:
    """A list for the opened transfers. An error ends them: a rank that skips the batch can open the next transfers."""
    transfers: list[Transfer] = []
    try:
        yield transfers
    except Exception:
        for transfer in transfers:
            transfer.abandon()
        raise


def ends_of_chunks(plan: Exchange, device: torch.device) -> list[Tensor]:
    """For each chunk (its experts,) int32: the end of each group, counted from the first row of the chunk."""
    ends = [[end - chunk.start for end in plan.group_ends[chunk.first : chunk.last]] for chunk in plan.chunks]
    width = -(-max(map(len, ends), default=0) // 4) * 4  # kernels take addresses that are multiples of 16 bytes
    padded = [end + [0] * (width - len(end)) for end in ends]
    # One copy. Pinned memory is copied behind the work of the stream; the host does not wait.
    host = torch.tensor(padded, dtype=torch.int32, pin_memory=device.type == "cuda")
    return [row[: len(end)] for row, end in zip(host.to(device, non_blocking=True), ends, strict=True)]
