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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core_kernels.exchange import Chunk, Exchange, plan_exchange
from ..core_kernels.formats import BLOCK
from ..core_kernels.recipe import LegName, Recipe
from . import ops
from ._differentiable import differentiable, save, saved_by
from ._torch_private import zero_each
from .mx_tensor import MXTensor, dequantized
from .products import dtype_name
from .transport import Leg, Part, Transport
from .weighted_combine import sum_slots

BF16 = torch.bfloat16


class Gradients(Protocol):
    """Of one chunk of experts."""

    def inputs(self) -> tuple[Tensor | None, Tensor | None]:
        """Of the rows and of their weights."""
        ...

    def weights(self) -> tuple[Tensor | None, ...]:
        """Of the parameters, after `inputs`."""
        ...


class Experts(Protocol):
    """What the experts compute: of parameters (G, ...) in bf16 or fp32, a chunk of groups at a time."""

    def forward(
        self, chunk: Chunk, x: Tensor, prob: Tensor, group_ends: Tensor, parameters: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
        """Return the rows (P, N) bf16 and what `backward` reads. needs: whether the rows, their weights and the
        parameters need gradients."""
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

    def rows_of(self, x: Tensor, name: LegName) -> tuple[Tensor, ...]:
        """The parts of the rows that travel to the experts, of tokens or of rows: q and sf, or plain."""
        if self.order is None:
            return self.parts_of(x, name)
        token = torch.div(self.order, self.top_k, rounding_mode="floor")
        if self.recipe.sends_mx(name):
            return ops.permute_mx(ops.quantize_row_packed(x.contiguous(), self.rounding), token)
        return (ops.permute_rows(x.contiguous(), token),)

    def parts_of(self, x: Tensor, name: LegName) -> tuple[Tensor, ...]:
        """Rows as the leg sends them: q and sf, or plain."""
        x = x.contiguous()
        return ops.quantize_row(x, self.rounding) if self.recipe.sends_mx(name) else (x,)

    def layout_of(self, width: int, dtype: torch.dtype, name: LegName) -> list[Part]:
        """The parts that `parts_of` makes of rows."""
        if self.recipe.sends_mx(name):
            return [Part(width, torch.uint8), Part(width // BLOCK, torch.uint8)]
        return [Part(width, dtype)]

    def received_rows(self, parts: Sequence[Tensor], dtype: torch.dtype, name: LegName) -> tuple[Tensor, list[Tensor]]:
        """Rows that are back at their tokens, and the parts that came with them."""
        if self.recipe.sends_mx(name):
            return ops.dequantize(parts[0], parts[1], dtype_name(dtype)), list(parts[2:])
        return parts[0], list(parts[1:])

    def leg_to_experts(self, plan: Exchange, sources: Sequence[Tensor]) -> Leg:
        """Open the leg, clear the padding of its groups and send every chunk."""
        parts = [Part(source.shape[1], source.dtype) for source in sources]
        leg = self.transport.leg("experts", plan.to_experts, plan.operand_rows, parts, sources[0].device)
        padding = [part[start:end] for part in leg.received for start, end in plan.padding]
        if padding:
            zero_each(padding)
        for c in range(len(plan.chunks)):
            leg.send(c, sources)
        return leg

    def leg_to_tokens(self, plan: Exchange, parts: Sequence[Part], device: torch.device) -> Leg:
        return self.transport.leg("tokens", plan.to_tokens, plan.token_rows, parts, device)

    def chunk_rows(
        self, leg: Leg, chunk: Chunk, dtype: torch.dtype, name: LegName, keep: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """The rows of a chunk that has arrived, and the parts that came with them."""
        parts = [part[chunk.start : chunk.end] for part in leg.received]
        if keep:
            parts = list(map(self.transport.keep, parts))
        return (MXTensor(parts[0], parts[1], dtype), parts[2:]) if self.recipe.sends_mx(name) else (parts[0], parts[1:])


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, call: Overlap, *parameters: Tensor | None) -> Tensor:
        need_x, need_probs, _, *need_parameters = ctx.needs_input_grad
        inside, device = call.prob_inside, x.device
        sources = call.rows_of(x, "dispatch")
        if inside:
            assert probs is not None
            assert call.order is not None
            sources = *sources, ops.permute_rows(probs.reshape(-1, 1), call.order)
        plan = plan_exchange(call.table(), call.rank, call.recipe.alignment)
        there = call.leg_to_experts(plan, sources)
        back = call.leg_to_tokens(plan, call.layout_of(call.width, BF16, "combine"), device)
        needs = need_x, need_probs and inside, *need_parameters
        keep = any(needs if inside else need_parameters)  # the backward reads the rows, and their weights if inside
        ends, saved = _ends_of_chunks(plan, device), []
        no_prob = torch.empty(0, dtype=torch.float32, device=device)
        for c, chunk in enumerate(plan.chunks):
            there.wait(c)
            rows, others = call.chunk_rows(there, chunk, x.dtype, "dispatch", keep)
            prob = others[0].squeeze(1) if inside else no_prob
            local = [p if p is None else p[chunk.first : chunk.last] for p in parameters]
            out, state = call.experts.forward(chunk, rows, prob, ends[c], local, needs)
            back.send(c, call.parts_of(out, "combine"))
            saved.append(state)
        there.close()
        for c in range(len(plan.chunks)):
            back.wait(c)
        home, _ = call.received_rows(back.received, BF16, "combine")
        weights = None if inside or probs is None else probs.contiguous()
        y = call.transport.keep(home).to(call.out_dtype) if call.order is None else _sum(call, home, weights)
        save(ctx, (tuple(saved), None if weights is None else (call.transport.keep(home), weights)))
        back.close()
        ctx.call, ctx.plan, ctx.needs, ctx.dim = call, plan, needs, x.shape[1]
        ctx.dtypes = x.dtype, *(None if p is None else p.dtype for p in parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, plan, (need_x, need_prob, *_) = ctx.call, ctx.plan, ctx.needs
        saved, weighted = saved_by(ctx)
        sources, dprobs = _gradient_rows(call, dequantized(grads[0]).contiguous(), weighted)
        there = call.leg_to_experts(plan, sources)
        parts = call.layout_of(ctx.dim, ctx.dtypes[0], "dispatch_grad") if need_x else []
        parts += [Part(1, torch.float32)] * need_prob
        back, steps = call.leg_to_tokens(plan, parts, grads[0].device) if parts else None, []
        for c, chunk in enumerate(plan.chunks):
            there.wait(c)
            dout, _ = call.chunk_rows(there, chunk, BF16, "combine_grad", False)
            step = call.experts.backward(saved[c], dout, ctx.dtypes, ctx.needs)
            dx, dprob = step.inputs()
            if back is not None:
                leaving = () if dx is None else call.parts_of(dx, "dispatch_grad")
                back.send(c, leaving if dprob is None or not need_prob else (*leaving, dprob.reshape(-1, 1)))
            steps.append(step)
        found = []
        while steps:  # what the steps hold is freed one by one
            found.append(steps.pop(0).weights())
        there.close()
        weights = [None if of[0] is None else _joined(of) for of in zip(*found, strict=True)]
        dx = None
        if back is not None:
            for c in range(len(plan.chunks)):
                back.wait(c)
            received = list(back.received)
            if need_x:
                rows, received = call.received_rows(received, ctx.dtypes[0], "dispatch_grad")
                dx = call.transport.keep(rows) if call.order is None else sum_slots(rows, call.slots, rows.dtype)
            if need_prob:
                dprobs = ops.permute_rows(received[0], call.inverse).view(-1, call.top_k)
            back.close()
        return dx, dprobs, None, *weights


def _gradient_rows(
    call: Overlap, dy: Tensor, weighted: tuple[Tensor, Tensor] | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The parts of the gradient's rows, and the gradient of the weights of the sum."""
    if weighted is None:
        return call.rows_of(dy.to(BF16), "combine_grad"), None
    (home, probs), mx = weighted, call.recipe.sends_mx("combine_grad")
    gradient, rounding = (ops.combine_bwd_row, (call.rounding,)) if mx else (ops.combine_bwd, ())
    *rows, dprobs = gradient(dy, home, call.slots, call.order, probs, *rounding)
    return tuple(rows), dprobs


def _sum(call: Overlap, home: Tensor, weights: Tensor | None) -> Tensor:
    """Each token's sum over its replicas."""
    if weights is None:
        return sum_slots(home, call.slots, call.out_dtype)
    return ops.combine(home, call.slots, weights, dtype_name(call.out_dtype))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _ends_of_chunks(plan: Exchange, device: torch.device) -> list[Tensor]:
    """For each chunk (its experts,) int32: the end of each group, counted from the first row of the chunk."""
    ends = [[end - chunk.start for end in plan.group_ends[chunk.first : chunk.last]] for chunk in plan.chunks]
    width = -(-max(map(len, ends), default=0) // 4) * 4  # kernels take addresses that are multiples of 16 bytes
    padded = [end + [0] * (width - len(end)) for end in ends]
    # One copy. Pinned memory is copied behind the work of the stream; the host does not wait.
    host = torch.tensor(padded, dtype=torch.int32, pin_memory=device.type == "cuda")
    return [row[: len(end)] for row, end in zip(host.to(device, non_blocking=True), ends, strict=True)]


overlapped = differentiable("expert parallelism", _Overlapped)
"""overlapped(x, probs, call, *parameters): dispatch, experts and combine, unchecked."""
