"""Experts of other ranks through memory of peers, between ordinary products, as one differentiable function.

    forward    rows, order, weights, counts --> own memory | layout, pull, products, push           | sums of slots
    backward   gradients                    --> own memory | pull, products, push, weight gradients | sums of slots
               bars: barriers of the ranks in the stream (mapped_memory.py)

Every recipe and form, and rows of any bytes. Nothing overlaps: device_exchange.py runs the calls that do, by the same
kernels of core_kernels/peer. The result and all gradients have the bytes of `dispatch`, experts and `combine`.

A call of several rounds (rounds.py) repeats the steps between the bars, and sums the slots once. Its backward repeats
the forward of the later rounds, which pushes nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.peer.programs.rows import write_pull, write_push
from ...core_kernels.peer.programs.writer import Sizes
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.launch import dtype_name
from ..ops.mx_tensor import MXTensor, dequantized
from ..products.gathered_weights import copied
from .local_experts import FFNExperts, LocalExperts, MMExperts
from .prepared import prepare
from .rank_rows import RankRows, run_first_round
from .rounds import Later
from .rows import BF16, Rows, Transfers

if TYPE_CHECKING:
    from .peer_memory import PeerMemory

ONE_GRANULE = Rows(8, BF16, None)
"""The rows that are pushed with the gradients of probabilities alone."""


class PeerCall(NamedTuple):
    """One call. The experts weight their rows, if there are probs."""

    rows: RankRows
    transfers: Transfers
    experts: FFNExperts | MMExperts
    out_dtype: torch.dtype

    def with_rows(self, rows: RankRows) -> "PeerCall":
        return self._replace(rows=rows)

    @property
    def memory(self) -> "PeerMemory":
        return self.rows.memory

    @property
    def sizes(self) -> Sizes:
        of, memory, there = self.rows, self.memory, self.transfers.dispatch
        width, dtype = self.transfers.combine.width, dtype_name(there.dtype)
        return Sizes(memory.rank, memory.ranks, of.groups, of.capacity, there.width, width, of.top_k, dtype, 0, ())

    def pull(self, rows: Rows, given: dict[str, Tensor]) -> tuple[Tensor | MXTensor, dict[str, Tensor]]:
        """This rank's operand, and the arrays that every program of the round takes. given: counts, or such arrays."""
        sizes, places, layout = self.sizes, self.rows.places, self.rows.layout if "counts" in given else None
        key = "pull", rows.nbytes, sizes, places, layout
        program = prepare(self.memory, key, lambda: write_pull(sizes, places, rows.nbytes, layout))
        found = program(self.memory, given | self.rows.given() | {"worst": self.memory.worst})
        return rows.operand(found.pop("values"), found.pop("scales")), given | found

    def push(self, rows: Rows, x: Tensor, numbers: Tensor | None, given: dict[str, Tensor]) -> None:
        """Rows of this rank's experts, and their numbers (P,), to the slots of all ranks."""
        sizes, places, length = self.sizes, self.rows.places, rows.nbytes.length
        key = "push", length, numbers is not None, sizes, places
        program = prepare(self.memory, key, lambda: write_push(sizes, places, length, numbers is not None))
        if numbers is None:
            numbers = torch.empty(0, dtype=torch.float32, device=x.device)
        program(self.memory, {**given, **self.rows.given(), "rows": rows.encoded(x), "numbers": numbers.contiguous()})


class _PeerExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, call: PeerCall, order: Tensor | None, counts: Tensor,
        *parameters: Tensor | None,
    ) -> Any:  # fmt: skip
        need_x, need_probs, _, _, _, *need_parameters = ctx.needs_input_grad
        needs, memory, home = (need_x, need_probs, *need_parameters), call.memory, call.transfers.combine

        def write(call: PeerCall) -> None:
            call.rows.write(x, call.transfers.dispatch)
            call.rows.write_order(order, probs)

        def run(call: PeerCall, table: Tensor) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
            given, y, state = _multiply(call, table, probs, parameters, needs)
            call.push(home, y, None, given)
            return given, state

        with memory.mapped.uninterrupted():
            call, (given, state), of_all = run_first_round(call, counts, write, run)
            later = call.rows.later(of_all)
            for of_round in later:
                _write_round(call, of_round, None, probs, order)
                other, y, _ = _multiply(call, of_round.counts, probs, parameters, (False,) * len(needs))
                call.push(home, y, None, other)
            memory.mapped.barrier()
            y = call.rows.sums(given["sources"], home, call.out_dtype)
        if any(needs):
            inputs = (x, probs, order, tuple(map(copied, parameters))) if later else None
            save(ctx, (tuple(given[name] for name in _GIVEN), given["sources"], state, inputs))
            ctx.call, ctx.needs, ctx.of_all = call, needs, of_all if later else None
            ctx.dtypes = x.dtype, *(None if p is None else p.dtype for p in parameters)
        ctx.mark_non_differentiable(given["totals"])
        return y, given["totals"]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: PeerCall = ctx.call
        (need_x, need_probs, *_), memory, home = ctx.needs, call.memory, call.transfers.dispatch_grad
        saved, sources, state, inputs = saved_by(ctx)
        given: dict[str, Tensor] = dict(zip(_GIVEN, saved, strict=True))
        with memory.mapped.uninterrupted():
            weights = _send_gradients(ctx, given, state, grads[0])
            del state
            for of_round in call.rows.later(ctx.of_all):
                x, probs, order, parameters = inputs
                _write_round(call, of_round, x, probs, order)
                given, _, state = _multiply(call, of_round.counts, probs, parameters, ctx.needs)
                memory.mapped.barrier()
                of_round.add(weights, _send_gradients(ctx, given, state, grads[0]))
                del state
            memory.mapped.barrier()
            dx = call.rows.sums(sources, home, home.dtype) if need_x else None
            dprobs = call.rows.numbers(sources) if need_probs else None
        return dx, dprobs, None, None, None, *weights


_GIVEN = "home", "group_ends"
"""What the programs of the backward take of the forward."""


def _multiply(
    call: PeerCall, counts: Tensor, probs: Tensor | None, parameters: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[dict[str, Tensor], Tensor, tuple[Any, ...]]:
    """The arrays of the round, the rows of this rank's experts, and what their backward needs."""
    rows, given = call.pull(call.transfers.dispatch, {"counts": counts})
    prob = given["prob"] if probs is not None else torch.empty(0, dtype=torch.float32, device=counts.device)
    y, state = call.experts.forward(rows, prob, given["group_ends"], parameters, needs, None)
    return given, y, state


def _write_round(call: PeerCall, of_round: Later, x: Tensor | None, probs: Tensor | None, order: Tensor | None) -> None:
    """x: None if this rank's memory has it."""
    call.memory.mapped.barrier()  # no rank reads rows and order of the round before any more
    if x is not None:
        call.rows.write(x, call.transfers.dispatch)
    call.rows.write_order(order, probs, of_round.rows)
    call.memory.mapped.barrier()


def _send_gradients(
    ctx: Any, given: dict[str, Tensor], state: tuple[Any, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of parameters. Gradients of rows and of probabilities are in the slots after the next barrier."""
    call: PeerCall = ctx.call
    need_x, need_probs, *_ = ctx.needs
    call.rows.write(dequantized(grad).to(BF16), call.transfers.combine_grad)
    call.memory.mapped.barrier()
    dout, _ = call.pull(call.transfers.combine_grad, given)
    steps = call.experts.backward(state, dout, ctx.dtypes, ctx.needs)
    dx, dprob = steps.inputs(None)
    numbers = dprob.reshape(-1) if need_probs and dprob is not None else None
    if need_x:
        assert dx is not None
        call.push(call.transfers.dispatch_grad, dx, numbers, given)
    elif numbers is not None:
        nothing = torch.empty((numbers.shape[0], ONE_GRANULE.width), dtype=BF16, device=numbers.device)
        call.push(ONE_GRANULE, nothing, numbers, given)
    return steps.weights()


_peer_experts = differentiable("expert parallelism", _PeerExperts)


def call_of(rows: RankRows, request: Request, found: LocalExperts, transfers: Transfers) -> PeerCall:
    assert request.out_dtype is not None
    return PeerCall(rows, transfers, found.experts, request.out_dtype)


def run(
    call: PeerCall, request: Request, x: Tensor, probs: Tensor | None, parameters: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """(T, width), or rows (M, width), and rows of all ranks per expert: dispatch, experts and combine, unchecked."""
    order = request.rows.order if isinstance(request.rows, TokenReplicas) else None
    return _peer_experts(x, probs, call, order, request.counts.to(torch.int32), *parameters)
