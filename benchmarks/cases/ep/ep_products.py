"""The computation of a rank's experts in a step over a transport, with its chunks and kernels, and nothing else:
quantization of weights, folds, products and SwiGLU of all chunks, forward and backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.exchange import plan_exchange
from mxep.core_kernels.policy.recipe import Recipe, TransferName
from mxep.torch_frontend import MXTensor, ops
from mxep.torch_frontend.overlap.planned_exchange import ends_of_chunks
from mxep.torch_frontend.overlap.schedule import Experts
from mxep.torch_frontend.overlap.transport import CHUNK_BYTES
from torch import Tensor

BF16 = torch.bfloat16


class Products:
    """experts, parameters: of this rank. table: the rows of each rank for each expert. rows (M, K), dout (M, N) bf16:
    stand-ins for the received rows, of the same values; prob (M,) their weights, or None."""

    def __init__(
        self, experts: Experts, parameters: Sequence[Tensor | None], recipe: Recipe, table: Sequence[Sequence[int]],
        rows: Tensor, dout: Tensor, prob: Tensor | None,
    ) -> None:  # fmt: skip
        self.recipe, self.experts, device = recipe, experts, rows.device
        self.parameters = tuple(p if p is None else p.detach() for p in parameters)
        self.needs = (True, prob is not None, *(p is not None for p in parameters))
        self.dtypes: Any = BF16, *(None if p is None else p.dtype for p in parameters)
        travels = self._as_sent(rows.detach()[:1], "dispatch")
        row_bytes = sum(part.nbytes for part in travels) + (0 if prob is None else prob.itemsize)
        plan = self.plan = plan_exchange(table, dist.get_rank(), recipe.alignment, CHUNK_BYTES // row_bytes)
        again = torch.arange(plan.operand_rows[dist.get_rank()], device=device) % len(rows)
        self.rows = self._as_sent(rows.detach()[again], "dispatch")
        self.gradients = self._as_sent(dout.detach()[again], "combine_grad")
        self.prob = torch.empty(0, device=device) if prob is None else prob.detach()[again]
        self.out = torch.empty(len(again), dout.shape[1], dtype=BF16, device=device)
        self.dx = torch.empty(len(again), rows.shape[1], dtype=BF16, device=device)
        self.dw = [p if p is None else torch.empty_like(p) for p in self.parameters]
        self.ends = ends_of_chunks(plan, device)

    def stages(self) -> dict[str, Callable[[], object]]:
        """Both directions by name."""
        saved = self.forward()
        return {"products forward": self.forward, "products backward": lambda: self.backward(saved)}

    def forward(self) -> list[tuple[Any, ...]]:
        """The saved tensors for the backward."""
        saved, experts = [], self.experts.quantized(self.parameters, self.needs)
        for c, chunk in enumerate(self.plan.chunks):
            x, buffer = self._chunk(self.rows, chunk.start, chunk.end), self.out[chunk.start : chunk.end]
            prob = self.prob[chunk.start : chunk.end] if len(self.prob) else self.prob
            local = [p if p is None else p[chunk.first : chunk.last] for p in self.parameters]
            saved.append(experts.forward(chunk, x, prob, self.ends[c], local, self.needs, buffer)[1])
        return saved

    def backward(self, saved: Sequence[tuple[Any, ...]]) -> None:
        steps = []
        for chunk, state in zip(self.plan.chunks, saved, strict=True):
            dout = self._chunk(self.gradients, chunk.start, chunk.end)
            steps.append(self.experts.backward(state, dout, self.dtypes, self.needs))
            steps[-1].inputs(self.dx[chunk.start : chunk.end])
        for chunk in self.plan.chunks:
            steps.pop(0).weights([None if dw is None else dw[chunk.first : chunk.last] for dw in self.dw])

    def _as_sent(self, x: Tensor, transfer: TransferName) -> tuple[Tensor, ...]:
        return ops.quantize_row(x, int(self.recipe.rounding)) if self.recipe.sends_mx(transfer) else (x,)

    def _chunk(self, parts: tuple[Tensor, ...], start: int, end: int) -> Tensor:
        parts = tuple(part[start:end] for part in parts)
        return MXTensor(parts[0], parts[1], BF16) if len(parts) == 2 else parts[0]
