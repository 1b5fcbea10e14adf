"""Expert parallelism through memory of peers: dispatch, experts and combine as one differentiable function, of which
the host reads no size.

    forward     share counts | lay out, push tokens | products of all experts | pull and sum rows
    backward                   push gradients       | products of all experts | pull and sum rows, weight gradients
                bars: barriers of the ranks in the stream (peer_memory.py)

A token is quantized once, and a kernel writes its bytes to the final row of each of its replicas, in the memory of the
expert's rank. The operand is as long as the memory has place for, the end of each group is on the device. The bytes of
the result and of all gradients are those of `dispatch`, experts and `combine` in turn.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core_kernels.dispatch import facts
from ..core_kernels.exchange import Chunk
from ..core_kernels.peer import plan
from ..core_kernels.recipe import LegName, Recipe
from ..core_kernels.registry import OPS
from . import _direct as ops
from ._call import into
from ._device import arch_of
from ._differentiable import differentiable, save, saved_by
from .ep import TokenReplicas
from .mx_tensor import MXTensor, dequantized
from .overlap import BF16, Experts, layout_of
from .peer_memory import PeerMemory
from .transport import Part

PROB = Part(1, torch.float32)


class Layout(NamedTuple):
    """Of one call. places (M,) int64: rank << 32 | row of each row of this rank, -1 without a place. group_ends,
    filled_ends (local experts,) int32: the ends of this rank's groups, with and without padding. totals (E,) int32:
    rows of all ranks. capacity: rows of an operand."""

    places: Tensor
    group_ends: Tensor
    filled_ends: Tensor
    totals: Tensor
    capacity: int


class PeerCall(NamedTuple):
    """One call. width: of the experts' rows. order, inverse, top_k: of TokenReplicas, or None and 1 for rows.
    prob_inside: the experts weight their rows."""

    memory: PeerMemory
    layout: Layout
    recipe: Recipe
    experts: Experts
    width: int
    out_dtype: torch.dtype
    inverse: Tensor | None
    top_k: int
    prob_inside: bool

    def push(self, x: Tensor, name: LegName, weights: Tensor | None = None) -> tuple[Tensor | MXTensor, Tensor | None]:
        """Write rows (T, K) to their places on all ranks, and weights (T, top_k) with them. Returns this rank's operand
        and the weights of its rows, which are there after the next barrier."""
        memory, at, mx = self.memory, self.layout, self.recipe.sends_mx(name)
        parts = layout_of(self.recipe, x.shape[1], x.dtype, name) + [PROB] * (weights is not None)
        starts = [*memory.starts("experts", at.capacity, parts), 0, 0]
        room = memory.views("experts", at.capacity, parts)
        weights_at = starts[len(parts) - 1] if weights is not None else 0
        scales = own_scales = x.new_empty(0, dtype=torch.uint8)
        word, per_row = "uint8", 0
        if mx:
            values, scales = ops.quantize_row(x.contiguous(), int(self.recipe.rounding))
            word, per_row = plan.words_of(scales.shape[1])
            scales, own_scales = (s.view(getattr(torch, word)) for s in (scales, room[1]))
        else:
            values = _aligned(x)
        values, own_values = values.view(torch.int64), room[0].view(torch.int64)
        prob = own_prob = x.new_empty(0, dtype=torch.float32)
        if weights is not None:
            prob, own_prob = weights.contiguous(), room[-1]
        flags = self.inverse is not None, weights is not None
        blocks = plan.push(values.shape[1], per_row, scales.element_size(), self.top_k, *flags)
        args = values, scales, prob, *self._maps(), x.shape[0], starts[0], starts[1] if mx else 0, weights_at
        memory.launch("push", min(x.shape[0], memory.width), *args, **blocks)
        blocks = plan.clear(values.shape[1], per_row, at.group_ends.shape[0], weights is not None)
        args = at.group_ends, at.filled_ends, own_values, own_scales, own_prob
        memory.launch("clear", at.capacity // plan.BLOCK, *args, **blocks)
        rows = MXTensor(room[0], room[1], x.dtype) if mx else room[0]
        return rows, room[-1].squeeze(1) if weights is not None else None

    def room(self, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """This rank's memory for rows on their way to tokens."""
        return self.memory.views("tokens", self.layout.capacity, parts)

    def written(self, x: Tensor, name: LegName, room: tuple[Tensor, ...]) -> None:
        """Rows as the leg sends them, in `room` if they are not there."""
        if self.recipe.sends_mx(name):
            into(room[:2], OPS["quantize_row"], x.contiguous(), rounding=int(self.recipe.rounding))
        elif x.data_ptr() != room[0].data_ptr():
            room[0].copy_(x)

    def pull(self, parts: Sequence[Part], tokens: int, dtype: torch.dtype, name: LegName, out: torch.dtype) -> Tensor:
        """(T, width) of dtype `out`: the sum of each token's replicas, rows of `dtype` in the memory of their ranks, or
        the row."""
        memory, device, width, mx = self.memory, self.layout.places.device, parts[0].width, self.recipe.sends_mx(name)
        y = torch.empty((tokens, width), dtype=out, device=device)
        starts = [*memory.starts("tokens", self.layout.capacity, parts), 0]
        hw_cast = device.type == "cuda" and facts(arch_of(device)).hw_cast
        flags = self.inverse is not None, mx, dtype == torch.float32, hw_cast
        args = *self._maps(), tokens, starts[0], starts[1] if mx else 0, y
        memory.launch("pull", min(tokens, memory.width), *args, **plan.pull(width, self.top_k, *flags))
        return y

    def pull_weights(self, parts: Sequence[Part], tokens: int) -> Tensor:
        """(T, top_k) fp32, the last part of each replica's row."""
        out = torch.empty((tokens, self.top_k), dtype=torch.float32, device=self.layout.places.device)
        start = self.memory.starts("tokens", self.layout.capacity, parts)[-1]
        args = *self._maps(), out.numel(), start, out
        self.memory.launch("pull_weights", -(-out.numel() // 256), *args, BLOCK_M=256)
        return out

    def _maps(self) -> tuple[Tensor, Tensor, Tensor]:
        room, places = self.memory.room, self.layout.places
        assert room is not None
        return places if self.inverse is None else self.inverse, places, room.addresses

    def kept(self, value: Any) -> Any:
        """What the backward reads, with memory of its own."""
        if isinstance(value, MXTensor):
            return MXTensor(self.kept(value.q), self.kept(value.sf), value.orig_dtype)
        if isinstance(value, tuple):
            items = map(self.kept, value)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value.clone() if isinstance(value, Tensor) and self.memory.holds(value) else value


def legs(recipe: Recipe, dim: int, dtype: torch.dtype, width: int) -> list[tuple[Any, list[Part]]]:
    """The most that each leg of a call carries: rows (.., dim) there, (.., width) back."""
    return [
        ("experts", [*layout_of(recipe, dim, dtype, "dispatch"), PROB]),
        ("experts", layout_of(recipe, width, BF16, "combine_grad")),
        ("tokens", layout_of(recipe, width, BF16, "combine")),
        ("tokens", [*layout_of(recipe, dim, dtype, "dispatch_grad"), PROB]),
    ]


def lay_out(memory: PeerMemory, counts: Tensor, rows: int, capacity: int, alignment: int) -> Layout:
    """Exchange the counts (E,) of all ranks and place the rows of this one; ends with the first barrier of a call."""
    experts, device, room = counts.shape[0], counts.device, memory.room
    assert room is not None
    counts = counts.to(torch.int32).contiguous()
    memory.launch(
        "share_counts", memory.ranks, counts, room.addresses, memory.rank, room.starts[0], **plan.share_counts(experts)
    )
    memory.meet()
    groups = experts // memory.ranks
    ends, filled, totals = (torch.empty(n, dtype=torch.int32, device=device) for n in (groups, groups, experts))
    places = torch.empty(rows, dtype=torch.int64, device=device)
    blocks = plan.lay_out(experts, memory.ranks, alignment)
    args = memory.counts(experts), memory.rank, rows, capacity, places, ends, filled, totals, memory.worst
    memory.launch("lay_out", experts, *args, **blocks)
    return Layout(places, ends, filled, totals, capacity)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, call: PeerCall, *parameters: Tensor | None) -> Tensor:
        need_x, need_probs, _, *need_parameters = ctx.needs_input_grad
        inside, memory, ends = call.prob_inside, call.memory, call.layout.group_ends
        with memory.uninterrupted():
            rows, prob = call.push(x, "dispatch", probs if inside else None)
            needs = need_x, need_probs and inside, *need_parameters
            experts = call.experts.quantized(parameters, needs)
            memory.meet()
            parts = layout_of(call.recipe, call.width, BF16, "combine")
            room, mx = call.room(parts), call.recipe.sends_mx("combine")
            prob = torch.empty(0, dtype=torch.float32, device=x.device) if prob is None else prob
            whole = Chunk(0, ends.shape[0], 0, call.layout.capacity)
            out, state = experts.forward(whole, rows, prob, ends, parameters, needs, None if mx else room[0])
            call.written(out, "combine", room)
            save(ctx, call.kept(state))
            memory.meet()
            ctx.call, ctx.needs, ctx.tokens, ctx.dim = call, needs, x.shape[0], x.shape[1]
            ctx.dtypes = x.dtype, *(None if p is None else p.dtype for p in parameters)
            return call.pull(parts, x.shape[0], BF16, "combine", call.out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, (need_x, need_prob, *_), dtype = ctx.call, ctx.needs, ctx.dtypes[0]
        memory, state = call.memory, saved_by(ctx)
        with memory.uninterrupted():
            memory.meet()
            dout, _ = call.push(dequantized(grads[0]).contiguous().to(BF16), "combine_grad")
            memory.meet()
            step = call.experts.backward(state, dout, ctx.dtypes, ctx.needs)
            parts = [*layout_of(call.recipe, ctx.dim, dtype, "dispatch_grad"), PROB]
            room, mx = call.room(parts), call.recipe.sends_mx("dispatch_grad")
            dx, dprob = step.inputs(room[0] if need_x and not mx else None)
            if dx is not None:
                call.written(dx, "dispatch_grad", room)
            if dprob is not None and need_prob:
                room[-1].copy_(dprob.reshape(-1, 1))
            memory.meet()
            dx = call.pull(parts, ctx.tokens, dtype, "dispatch_grad", dtype) if need_x else None
            dprobs = call.pull_weights(parts, ctx.tokens) if need_prob else None
            return dx, dprobs, None, *step.weights([None] * len(ctx.needs[2:]))


def _aligned(x: Tensor) -> Tensor:
    """x with dense rows at an address that kernels take."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


exchanged = differentiable("expert parallelism", _Exchanged)
"""exchanged(x, probs, call, *parameters): dispatch, experts and combine, unchecked."""


def maps_of(rows: Tensor | TokenReplicas) -> tuple[Tensor, Tensor | None, int]:
    """x, inverse and top_k of a `PeerCall`."""
    return (rows.x, rows.inverse, rows.top_k) if isinstance(rows, TokenReplicas) else (rows, None, 1)
