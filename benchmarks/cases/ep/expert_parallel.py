"""Expert parallelism of one GEMM: a plain pipeline, and ours without and with overlap.

"in turn"    dispatch --> grouped_mm --> combine, without a transport
overlapped   expert_parallel_mm, over peer memory
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from mxep.core_kernels.grouped_gemm.cases import TIMED
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import combine, grouped_mm
from mxep.torch_frontend.exchange.counts import Request
from mxep.torch_frontend.exchange.dispatch import dispatch_over
from mxep.torch_frontend.exchange.shards import Ranks
from mxep.torch_frontend.overlap.expert_parallel import Overlapped
from mxep.torch_frontend.overlap.local_experts import MM
from mxep.torch_frontend.overlap.peer_memory import PeerMemory
from torch import Tensor

from ...peers.expert_parallel import grouped_mm_bf16, pipeline
from ..case import Tensors
from ..chosen_experts import counts as rows_of_experts
from .ep_work import BF16_WIRE, IN_TURN, PEER, Work

BF16 = torch.bfloat16
MIN_SQNR_DB = 21.0
OUTPUTS = ("y", "rows", "w")


class EPShape(NamedTuple):
    """rows per rank (K = dim), for `experts` of this rank and as many of each other one; N = hidden."""

    rows: int
    dim: int
    hidden: int
    experts: int


H200 = tuple(EPShape(*p[:4]) for p in TIMED if p.routing == "balanced")
TINY = (EPShape(256, 64, 32, 2),)


class Inputs(NamedTuple):
    """rows (M, K) and w (G, N, K) bf16 leaves; dy (M, N); counts (E,); all ranks of the default group. table: the
    counts of each rank."""

    rows: Tensor
    w: Tensor
    dy: Tensor
    counts: Tensor
    ranks: Ranks
    table: list[list[int]]

    @classmethod
    def of(cls, shape: EPShape, routing: str, device: torch.device) -> "Inputs":
        group = dist.group.WORLD
        assert group is not None
        torch.manual_seed(group.rank())
        rows = torch.randn(shape.rows, shape.dim, device=device).to(BF16).requires_grad_()
        w = torch.randn(shape.experts, shape.hidden, shape.dim, device=device).to(BF16).requires_grad_()
        dy = torch.randn(shape.rows, shape.hidden, device=device).to(BF16)
        experts = shape.experts * group.size()
        table = [rows_of_experts(routing, shape.rows, experts, rank) for rank in range(group.size())]
        counts = torch.tensor(table[group.rank()], dtype=torch.int32, device=device)
        return cls(rows, w, dy, counts, Ranks(group.group_name, group.size(), experts, device.type), table)

    @property
    def received(self) -> list[list[int]]:
        """For each rank its rows for the experts of this rank."""
        local = self.w.shape[0]
        first = dist.get_rank() * local
        return [of_rank[first : first + local] for of_rank in self.table]

    def step(self, forward: Callable[[], Tensor]) -> Tensors:
        """y and the gradients of rows and w."""
        y = forward()
        return (y.detach(), *torch.autograd.grad(y, (self.rows, self.w), self.dy))


def work(
    shape: EPShape, routing: str, recipe: Recipe, transports: Mapping[str, PeerMemory], device: torch.device
) -> Work:
    """The pipeline of a product at this shape, for all ranks of the default group."""
    inputs, group = Inputs.of(shape, routing, device), dist.group.WORLD
    assert group is not None
    rows, w, _, counts, ranks, _ = inputs
    groups = torch.tensor(inputs.received, device=device).sum(0)
    ends = groups.cumsum(0).to(torch.int32)

    request = Request("benchmark", rows, counts, recipe, ranks, out_dtype=BF16)

    def in_turn() -> Tensor:
        groups, _, route = dispatch_over(request)
        return combine(grouped_mm(groups, w, route.group_ends, recipe=recipe, pad_token_groups=False), route)

    def over(transport: PeerMemory) -> Callable[[], Tensor]:
        exchange = Overlapped(transport)
        return lambda: exchange.dispatch(request)[2].run(MM(w, None, recipe), rows, None)

    ours = lambda x, w: grouped_mm(x, w, ends, recipe=recipe, pad_token_groups=False)  # noqa: E731
    m, k, n, _ = shape
    return Work(
        op="ep",
        case={**shape._asdict(), "ranks": ranks.degree, "routing": routing, "recipe": recipe.name},
        flops=(2 * m * k * n, 6 * m * k * n),
        outputs=OUTPUTS,
        forwards={
            PEER: pipeline(rows, w, inputs.table, grouped_mm_bf16(ends)),
            BF16_WIRE: pipeline(rows, w, inputs.table, ours),
            IN_TURN: in_turn,
            **{name: over(transport) for name, transport in transports.items()},
        },
        step=inputs.step,
        groups=groups > 0,
        min_sqnr_db=MIN_SQNR_DB,
    )
