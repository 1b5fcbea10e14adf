"""Expert parallelism whose exchanges run beside the products: dispatch, experts and combine as one differentiable
function.

    tokens --quantize--> rows ~~chunk 0~~> operand --products--> rows ~~> sum of each token's replicas
                              ~~chunk 1~~> operand --products--> rows ~~>
                              ~~chunk 2~~> ...                              ~~> travels beside the products before it

A chunk is a range of local experts. The ranks exchange their counts first, so every row travels to its final place in
the receiver's padded groups and back to its place among the sender's rows: nothing is permuted after the wire. The
backward runs the same steps: gradients of outputs travel to the experts by chunk, gradients of inputs leave by chunk,
and the gradients of weights are computed while the last ones travel.

The bytes of the result and of all gradients are those of `dispatch`, experts and `combine` in turn.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core_kernels.exchange import Chunk, Exchange, plan_exchange
from ..core_kernels.formats import BLOCK
from ..core_kernels.recipe import LegName, Recipe
from ..core_kernels.registry import OPS
from . import _direct as ops
from ._call import into
from ._differentiable import differentiable, save, saved_by
from ._launch import dtype_name
from .mx_tensor import MXTensor, dequantized
from .symmetric import zero_each
from .transport import Leg, Part, Transport
from .weighted_combine import sum_slots

BF16 = torch.bfloat16


class Gradients(Protocol):
    """Of one chunk of experts."""

    def inputs(self, out: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Of the rows, written to `out` if there is one, and of their weights."""
        ...

    def weights(self, out: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Of the parameters, after `inputs`. out: tensors to write, of matrices alone."""
        ...


class Experts(Protocol):
    """What the experts compute: of parameters (G, ...) in bf16 or fp32, a chunk of groups at a time."""

    def quantized(self, parameters: Sequence[Tensor | None], needs: Sequence[bool]) -> "Experts":
        """The same with weights quantized now, all at once."""
        ...

    def forward(
        self, chunk: Chunk, x: Tensor, prob: Tensor, group_ends: Tensor, parameters: Sequence[Tensor | None],
        needs: Sequence[bool], out: Tensor | None,
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        """Return the rows (P, N) bf16, written to `out` if there is one, and what `backward` reads. needs: whether the
        rows, their weights and the parameters need gradients."""
        ...

    def backward(
        self, saved: tuple[Any, ...], dout: Tensor, dtypes: tuple[torch.dtype, ...], needs: Sequence[bool]
    ) -> Gradients: ...


class Overlap(NamedTuple):
    """One call: how rows travel, and what the experts compute.

    table: waits for the counts and returns them, (ranks, E) rows of each rank for each expert. width: of the experts'
    rows. order, inverse, top_k: of TokenReplicas, or None and 0 for rows. prob_inside: the experts weight their rows,
    else the sum does.
    """

    transport: Transport
    rank: int
    table: Callable[[], list[list[int]]]
    recipe: Recipe
    experts: Experts
    width: int
    out_dtype: torch.dtype
    order: Tensor | None
    inverse: Tensor | None
    top_k: int
    prob_inside: bool

    @property
    def rounding(self) -> int:
        return int(self.recipe.rounding)

    @property
    def slots(self) -> Tensor:
        assert self.inverse is not None
        return self.inverse.view(-1, self.top_k)

    def leaving_rows(self, x: Tensor, name: LegName, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        """The parts of the rows that travel to the experts, of tokens or of rows: q and sf, or plain; with their
        weights (T, top_k), if they travel too."""
        x, parts = x.contiguous(), self.layout_of(x.shape[1], x.dtype, name)
        if self.order is None:
            return self.written(x, name, None if parts[0].dtype == x.dtype else self.room(x, parts))
        token = torch.div(self.order, self.top_k, rounding_mode="floor")
        room = self.room(x, parts if weights is None else [*parts, Part(1, weights.dtype)])
        if self.recipe.sends_mx(name):
            into(room[:2], OPS["permute_mx"], ops.quantize_row_packed(x, self.rounding), token)
        else:
            into(room[:1], OPS["permute_rows"], x, token)
        if weights is not None:
            into(room[-1:], OPS["permute_rows"], weights.contiguous().view(-1, 1), self.order)
        return room

    def least_rows(self, leaving: Sequence[Tensor]) -> int:
        """The rows that make a chunk of the transport's size."""
        return max(self.transport.chunk_bytes // sum(part.shape[1] * part.dtype.itemsize for part in leaving), 1)

    def room(self, x: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """Memory for the rows of this rank that travel to the experts."""
        rows = x.shape[0] if self.order is None else self.order.shape[0]
        return self.transport.outgoing("experts", rows, parts, x.device)

    def written(self, x: Tensor, name: LegName, room: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Rows as the leg sends them: q and sf in `room`, or plain, which are x itself or a copy in `room`."""
        if self.recipe.sends_mx(name):
            assert room is not None
            return into(room, OPS["quantize_row"], x.contiguous(), rounding=self.rounding)
        if room is None or room[0].data_ptr() == x.data_ptr():
            return (x,)
        room[0].copy_(x)
        return room

    def layout_of(self, width: int, dtype: torch.dtype, name: LegName) -> list[Part]:
        """The parts of rows: q and sf, or plain."""
        return layout_of(self.recipe, width, dtype, name)

    def received_rows(self, parts: Sequence[Tensor], dtype: torch.dtype, name: LegName) -> tuple[Tensor, list[Tensor]]:
        """Rows that are back at their tokens, and the parts that came with them."""
        if self.recipe.sends_mx(name):
            return ops.dequantize(parts[0], parts[1], dtype_name(dtype)), list(parts[2:])
        return parts[0], list(parts[1:])

    def leg_to_experts(self, plan: Exchange, rows: tuple[Tensor, ...], legs: list[Leg]) -> Leg:
        """Open the leg, add it to the open ones, clear the padding of its groups and send every chunk."""
        leg = self.transport.leg("experts", plan.to_experts, plan.token_rows, plan.operand_rows, rows)
        legs.append(leg)
        padding = [part[start:end] for part in leg.received for start, end in plan.padding]
        if padding:
            zero_each(padding)
        leg.send(range(len(plan.chunks)))
        return leg

    def leg_to_tokens(self, plan: Exchange, parts: Sequence[Part], device: torch.device, legs: list[Leg]) -> Leg:
        room = self.transport.outgoing("tokens", plan.operand_rows[self.rank], parts, device)
        legs.append(self.transport.leg("tokens", plan.to_tokens, plan.operand_rows, plan.token_rows, room))
        return legs[-1]

    def chunk_rows(self, leg: Leg, chunk: Chunk, dtype: torch.dtype, name: LegName) -> tuple[Tensor, list[Tensor]]:
        """The rows of a chunk that has arrived, and the parts that came with them."""
        parts = [part[chunk.start : chunk.end] for part in leg.received]
        return (MXTensor(parts[0], parts[1], dtype), parts[2:]) if self.recipe.sends_mx(name) else (parts[0], parts[1:])


def layout_of(recipe: Recipe, width: int, dtype: torch.dtype, name: LegName) -> list[Part]:
    """The parts of rows: q and sf, or plain."""
    if recipe.sends_mx(name):
        return [Part(width, torch.uint8), Part(width // BLOCK, torch.uint8)]
    return [Part(width, dtype)]


@contextmanager
def ended_legs() -> Iterator[list[Leg]]:
    """A list for the legs that open. An error ends them: a rank that skips the batch can open the next ones."""
    legs: list[Leg] = []
    try:
        yield legs
    except Exception:
        for leg in legs:
            leg.abandon()
        raise


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, call: Overlap, *parameters: Tensor | None) -> Tensor:
        need_x, need_probs, _, *need_parameters = ctx.needs_input_grad
        inside, device, mx = call.prob_inside, x.device, call.recipe.sends_mx("combine")
        needs = need_x, need_probs and inside, *need_parameters
        with ended_legs() as legs:
            # Before the rows: on a GPU both run while the host waits for the counts and makes the plan.
            experts = call.experts.quantized(parameters, needs)
            leaving = call.leaving_rows(x, "dispatch", probs if inside else None)
            plan = plan_exchange(call.table(), call.rank, call.recipe.alignment, call.least_rows(leaving))
            there = call.leg_to_experts(plan, leaving, legs)
            back = call.leg_to_tokens(plan, call.layout_of(call.width, BF16, "combine"), device, legs)
            ends, saved = ends_of_chunks(plan, device), []
            no_prob = torch.empty(0, dtype=torch.float32, device=device)
            for c, chunk in enumerate(plan.chunks):
                there.wait(c)
                rows, others = call.chunk_rows(there, chunk, x.dtype, "dispatch")
                prob = others[0].squeeze(1) if inside else no_prob
                local = [p if p is None else p[chunk.first : chunk.last] for p in parameters]
                room = tuple(part[chunk.start : chunk.end] for part in back.outgoing)
                place = None if mx else room[0]
                out, state = experts.forward(chunk, rows, prob, ends[c], local, needs, place)
                call.written(out, "combine", room)
                back.send(range(c, c + 1))
                saved.append(state)
            for c in range(len(plan.chunks)):
                back.wait(c)
            home, _ = call.received_rows(back.received, BF16, "combine")
            weights = None if inside or probs is None else probs.contiguous()
            y = home.to(call.out_dtype) if call.order is None else _sum(call, home, weights)
        save(ctx, (tuple(saved), None if weights is None else (home, weights)))
        ctx.call, ctx.plan, ctx.needs, ctx.dim = call, plan, needs, x.shape[1]
        ctx.dtypes = x.dtype, *(None if p is None else p.dtype for p in parameters)
        ctx.shapes = [None if p is None else p.shape for p in parameters]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, plan, (need_x, need_prob, *_) = ctx.call, ctx.plan, ctx.needs
        saved, weighted = saved_by(ctx)
        with ended_legs() as legs:
            leaving, dprobs = _gradient_rows(call, dequantized(grads[0]).contiguous(), weighted)
            there, mx = call.leg_to_experts(plan, leaving, legs), call.recipe.sends_mx("dispatch_grad")
            parts = call.layout_of(ctx.dim, ctx.dtypes[0], "dispatch_grad") if need_x else []
            parts += [Part(1, torch.float32)] * need_prob
            back, steps = call.leg_to_tokens(plan, parts, grads[0].device, legs) if parts else None, []
            for c, chunk in enumerate(plan.chunks):
                there.wait(c)
                dout, _ = call.chunk_rows(there, chunk, BF16, "combine_grad")
                step = call.experts.backward(saved[c], dout, ctx.dtypes, ctx.needs)
                outgoing = () if back is None else back.outgoing
                room: tuple[Tensor, ...] = tuple(part[chunk.start : chunk.end] for part in outgoing)
                dx, dprob = step.inputs(room[0] if need_x and not mx else None)
                if back is not None:
                    if dx is not None:
                        call.written(dx, "dispatch_grad", room[: len(room) - need_prob])
                    if dprob is not None and need_prob:
                        room[-1].copy_(dprob.reshape(-1, 1))
                    back.send(range(c, c + 1))
                steps.append(step)
            whole, found = _whole_gradients(ctx, grads[0].device), []
            for chunk in plan.chunks:  # what the steps hold is freed one by one
                out = [None if w is None else w[chunk.first : chunk.last] for w in whole]
                found.append(steps.pop(0).weights(out))
            weights = [
                None if of[0] is None else torch.cat(of) if w is None else w
                for w, of in zip(whole, zip(*found, strict=True), strict=True)
            ]
            dx = None
            if back is not None:
                for c in range(len(plan.chunks)):
                    back.wait(c)
                received = list(back.received)
                if need_x:
                    rows, received = call.received_rows(received, ctx.dtypes[0], "dispatch_grad")
                    dx = rows if call.order is None else sum_slots(rows, call.slots, rows.dtype)
                if need_prob:
                    dprobs = ops.permute_rows(received[0], call.inverse).view(-1, call.top_k)
        return dx, dprobs, None, *weights


def _gradient_rows(
    call: Overlap, dy: Tensor, weighted: tuple[Tensor, Tensor] | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The parts of the gradient's rows, and the gradient of the weights of the sum."""
    if weighted is None:
        return call.leaving_rows(dy.to(BF16), "combine_grad"), None
    home, probs = weighted
    room = call.room(dy, call.layout_of(dy.shape[1], BF16, "combine_grad"))
    assert call.order is not None
    operands = dy, home, call.slots, call.order, probs
    if call.recipe.sends_mx("combine_grad"):
        *rows, dprobs = into(room, OPS["combine_bwd_row"], *operands, rounding=call.rounding)
    else:
        *rows, dprobs = into(room, OPS["combine_bwd"], *operands)
    return tuple(rows), dprobs


def _sum(call: Overlap, home: Tensor, weights: Tensor | None) -> Tensor:
    """Each token's sum over its replicas."""
    if weights is None:
        return sum_slots(home, call.slots, call.out_dtype)
    return ops.combine(home, call.slots, weights, dtype_name(call.out_dtype))


def _whole_gradients(ctx: Any, device: torch.device) -> list[Tensor | None]:
    """Memory for the gradients of the matrices, which the chunks write part by part."""
    of_parameters = zip(ctx.shapes, ctx.dtypes[1:], ctx.needs[2:], strict=True)
    return [
        torch.empty(shape, dtype=dtype, device=device) if need and len(shape) == 3 else None
        for shape, dtype, need in of_parameters
    ]


def ends_of_chunks(plan: Exchange, device: torch.device) -> list[Tensor]:
    """For each chunk (its experts,) int32: the end of each group, counted from the first row of the chunk."""
    ends = [[end - chunk.start for end in plan.group_ends[chunk.first : chunk.last]] for chunk in plan.chunks]
    width = -(-max(map(len, ends), default=0) // 4) * 4  # kernels take addresses that are multiples of 16 bytes
    padded = [end + [0] * (width - len(end)) for end in ends]
    # One copy. Pinned memory is copied behind the work of the stream; the host does not wait.
    host = torch.tensor(padded, dtype=torch.int32, pin_memory=device.type == "cuda")
    return [row[: len(end)] for row, end in zip(host.to(device, non_blocking=True), ends, strict=True)]


overlapped = differentiable("expert parallelism", _Overlapped)
"""overlapped(x, probs, call, *parameters): dispatch, experts and combine, unchecked."""
