"""Expert parallelism of one product: our pipeline in turn and overlapped, and its stages alone.

in turn      dispatch --> grouped_mm --> combine
overlapped   expert_parallel_mm, by each transport
wire         the legs of one direction, without products
products     quantization of weights, folds and products of all chunks, without a wire
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from mxep.core_kernels.exchange import Exchange, plan_exchange
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.recipe import Recipe
from mxep.torch_frontend import MXTensor, combine, grouped_mm, ops
from mxep.torch_frontend.expert_parallel import MMExperts, mm_over
from mxep.torch_frontend.grouped_mm import MMCall
from mxep.torch_frontend.overlap import ends_of_chunks
from mxep.torch_frontend.pipeline import dispatch_over
from mxep.torch_frontend.products import ProductOptions
from mxep.torch_frontend.shards import Ranks
from mxep.torch_frontend.transport import CHUNK_BYTES, Part, Transport
from torch import Tensor

from ..peers.expert_parallel import grouped_mm_bf16, pipeline

BF16 = torch.bfloat16


class EPShape(NamedTuple):
    """rows per rank (K = dim), for `experts` of this rank and as many of each other one; N = hidden."""

    rows: int
    dim: int
    hidden: int
    experts: int


H200 = (EPShape(131072, 7168, 2048, 8), EPShape(131072, 8192, 5120, 8), EPShape(131072, 2048, 1408, 8))
TINY = (EPShape(256, 64, 32, 2),)


class Inputs(NamedTuple):
    """rows (M, K) and w (G, N, K) bf16 leaves; dy (M, N); counts (E,); all ranks of the default group."""

    rows: Tensor
    w: Tensor
    dy: Tensor
    counts: Tensor
    ranks: Ranks

    @classmethod
    def of(cls, shape: EPShape, device: torch.device) -> "Inputs":
        group = dist.group.WORLD
        assert group is not None
        torch.manual_seed(group.rank())
        rows = torch.randn(shape.rows, shape.dim, device=device).to(BF16).requires_grad_()
        w = torch.randn(shape.experts, shape.hidden, shape.dim, device=device).to(BF16).requires_grad_()
        dy = torch.randn(shape.rows, shape.hidden, device=device).to(BF16)
        experts = shape.experts * group.size()
        counts = torch.full((experts,), shape.rows // experts, dtype=torch.int32, device=device)
        return cls(rows, w, dy, counts, Ranks(group.group_name, group.size(), experts, device.type))

    def row_bytes(self, recipe: Recipe) -> int:
        """Of a row on its way to the experts."""
        k = self.rows.shape[1]
        return k + k // BLOCK if recipe.mx else 2 * k

    def backward(self, forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """y and the gradients of rows and w."""
        self.rows.grad = self.w.grad = None
        y = forward()
        y.backward(self.dy)
        assert self.rows.grad is not None
        assert self.w.grad is not None
        return y, self.rows.grad, self.w.grad


def candidates(inputs: Inputs, recipe: Recipe, transports: Mapping[str, Transport]) -> dict[str, Callable[[], Tensor]]:
    """Name -> the forward. "bf16" is the baseline; "bf16 wire" has bf16 all-to-alls and our products."""
    rows, w, _, counts, ranks = inputs
    ends = torch.arange(1, w.shape[0] + 1, device=rows.device, dtype=torch.int32) * (rows.shape[0] // w.shape[0])

    def in_turn() -> Tensor:
        groups, _, route = dispatch_over(rows, counts, recipe, ranks)
        return combine(grouped_mm(groups, w, route.group_ends, recipe=recipe, pad_token_groups=False), route)

    def overlapped(transport: Transport) -> Callable[[], Tensor]:
        return lambda: mm_over("benchmark", rows, counts, w, None, BF16, recipe, ranks, transport)[0]

    ours = lambda x, w: grouped_mm(x, w, ends, recipe=recipe, pad_token_groups=False)  # noqa: E731
    return {
        "bf16": pipeline(rows, w, grouped_mm_bf16(rows, w.shape[0])),
        "bf16 wire": pipeline(rows, w, ours),
        "in turn": in_turn,
        **{name: overlapped(transport) for name, transport in transports.items()},
    }


class Stages:
    """The parts of both directions of `expert_parallel_mm`, each alone, with the steps of the overlapped call."""

    def __init__(self, inputs: Inputs, recipe: Recipe) -> None:
        self.inputs, self.device = inputs, inputs.rows.device
        ranks, rows, w = inputs.ranks.degree, inputs.rows, inputs.w
        table = [inputs.counts.tolist()] * ranks
        self.plan: Exchange = plan_exchange(
            table, dist.get_rank(), recipe.alignment, CHUNK_BYTES // inputs.row_bytes(recipe)
        )
        self.needs = (True, False, True, False)
        self.experts = MMExperts(MMCall(ProductOptions.of(recipe, self.device, False, True), BF16), None)
        rounding, mine = int(recipe.rounding), self.plan.operand_rows[dist.get_rank()]
        # The rows that travel have the values of this rank's own: a rank receives as many.
        assert mine == rows.shape[0]
        quantize = (lambda x: ops.quantize_row(x.detach(), rounding)) if recipe.mx else (lambda x: (x.detach(),))
        self.rows, self.gradients = quantize(rows), quantize(inputs.dy)
        self.out, self.dx = torch.empty_like(inputs.dy), torch.empty_like(rows.detach())
        self.ends = ends_of_chunks(self.plan, self.device)
        self.w, self.dw = w.detach(), torch.empty_like(w)

    def wire(self, transport: Transport, backward: bool) -> None:
        sources, back = (self.gradients, self.dx) if backward else (self.rows, self.out)
        self._leg(transport, "experts", sources)
        self._leg(transport, "tokens", (back,))

    def _leg(self, transport: Transport, where: Literal["experts", "tokens"], rows: tuple[Tensor, ...]) -> None:
        plan, there = self.plan, where == "experts"
        steps = plan.to_experts if there else plan.to_tokens
        sent, received = (plan.token_rows, plan.operand_rows)[:: 1 if there else -1]
        parts = [Part(part.shape[1], part.dtype) for part in rows]
        room = transport.outgoing(where, rows[0].shape[0], parts, self.device)  # its values do not matter
        leg = transport.leg(where, steps, sent, received, room)
        if there:
            leg.send(range(len(plan.chunks)))
        for c in () if there else range(len(plan.chunks)):
            leg.send(range(c, c + 1))
        for c in range(len(plan.chunks)):
            leg.wait(c)

    def forward(self) -> list[tuple[object, ...]]:
        """The products of all chunks; what their backward reads."""
        saved, no_prob = [], torch.empty(0, device=self.device)
        for c, chunk in enumerate(self.plan.chunks):
            x, w = self._chunk(self.rows, chunk.start, chunk.end), self.w[chunk.first : chunk.last]
            room = self.out[chunk.start : chunk.end]
            saved.append(self.experts.forward(chunk, x, no_prob, self.ends[c], (w, None), self.needs, room)[1])
        return saved

    def backward(self, saved: list[tuple[object, ...]]) -> None:
        steps = []
        for chunk, state in zip(self.plan.chunks, saved, strict=True):
            dout = self._chunk(self.gradients, chunk.start, chunk.end)
            steps.append(self.experts.backward(state, dout, (BF16, BF16, None), self.needs))  # type: ignore[arg-type]
            steps[-1].inputs(self.dx[chunk.start : chunk.end])
        for chunk in self.plan.chunks:
            steps.pop(0).weights([self.dw[chunk.first : chunk.last]])

    def _chunk(self, parts: tuple[Tensor, ...], start: int, end: int) -> Tensor:
        parts = tuple(part[start:end] for part in parts)
        return MXTensor(parts[0], parts[1], BF16) if len(parts) == 2 else parts[0]
