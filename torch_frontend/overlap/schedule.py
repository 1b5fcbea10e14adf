"""Expert parallelism whose exchanges are overlapped with the products: dispatch, experts and combine as one
differentiable function.

    tokens --quantize--> rows ~~chunk 0~~> operand --products--> rows ~~> sum of each token's replicas
                              ~~chunk 1~~> operand --products--> rows ~~>
                              ~~chunk 2~~> ...                              ~~> overlapped with products of chunk 1

A chunk is a range of local experts. Every row is sent to its final offset in the receiver's padded groups. Its result
is sent to the row's offset at the sender. Nothing is permuted after an exchange. The backward runs the same steps: it
sends the gradients of outputs to the experts by chunk, and the gradients of inputs back by chunk. The gradients of
weights are computed during the last transfers.

A `RowExchange` sends the rows: to offsets that the host plans (planned_exchange.py), or by kernels that write and read
the memory of peers (peer_exchange.py). The result and all gradients have the same bytes as from `dispatch`, experts and
`combine` without overlap.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.policy.exchange import Chunk
from ...core_kernels.policy.recipe import Recipe, TransferName
from ...core_kernels.registry import OPS
from ..ops.call import call_out
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.mx_tensor import MXTensor, dequantized
from .transport import Part

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


class Rows(NamedTuple):
    """The rows of one transfer: q and sf if there is a rounding, else values of the dtype."""

    width: int
    dtype: torch.dtype
    rounding: int | None

    @classmethod
    def of(cls, recipe: Recipe, name: TransferName, width: int, dtype: torch.dtype) -> "Rows":
        return cls(width, dtype, int(recipe.rounding) if recipe.sends_mx(name) else None)

    @property
    def parts(self) -> list[Part]:
        if self.rounding is None:
            return [Part(self.width, self.dtype)]
        return [Part(self.width, torch.uint8), Part(self.width // BLOCK, torch.uint8)]

    def operand(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows in these parts, of which the others are ignored."""
        return parts[0] if self.rounding is None else MXTensor(parts[0], parts[1], self.dtype)

    def write(self, x: Tensor, buffer: Sequence[Tensor]) -> None:
        """Write x to `buffer` as the transfer sends it, unless x is there already. Later parts are not written."""
        if self.rounding is not None:
            call_out(tuple(buffer[:2]), OPS["quantize_row"], x.contiguous(), rounding=self.rounding)
        elif buffer[0].data_ptr() != x.data_ptr():
            buffer[0].copy_(x)


class ExchangePass(Protocol):
    """Rows to the experts and rows of the experts home, once, a chunk of experts at a time."""

    @property
    def chunks(self) -> Sequence[Chunk]: ...

    def depart(self) -> None:
        """In a forward, before the steps below: send the unsent rows. The experts' weights are quantized before."""
        ...

    def ends(self) -> Sequence[Tensor]:
        """For each chunk (its experts,) int32: the end of each group, counted from the first row of the chunk."""
        ...

    def operands(self, chunk: int) -> tuple[Tensor, Tensor | None]:
        """The rows of a chunk, for work that the current stream gets from now on, and their weights."""
        ...

    def return_buffer(self, chunk: int) -> tuple[Tensor, ...]:
        """Memory for the rows of the chunk on their way home, and for the gradients of their weights."""
        ...

    def clone_if_in_buffer(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the backward of a chunk reads, in memory that lasts until then; before the chunk is sent back."""
        ...

    def send_back(self, chunk: int) -> None: ...

    def sums(self, out_dtype: torch.dtype, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sums of the tokens, weighted (T, top_k) if there are weights, or the rows; and what their gradient
        reads."""
        ...

    def gradients(
        self, needs: tuple[bool, bool], beside: Callable[[], list[Tensor | None]]
    ) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """Of the rows, of the weights, if they are needed, and what `beside` returns, which launches work that does not
        wait for rows."""
        ...


class RowExchange(Protocol):
    """Sends the rows of one call, forward and backward; an error within the block ends the `ExchangePass`. totals: (E,)
    rows of all ranks per expert."""

    @property
    def totals(self) -> Tensor: ...

    def forward(
        self, x: Tensor, weights: Tensor | None, there: Rows, home: Rows
    ) -> AbstractContextManager[ExchangePass]:
        """x, with their weights if the experts weight the rows."""
        ...

    def backward(
        self, dy: Tensor, weighted: tuple[Tensor, Tensor] | None, there: Rows, home: Rows, needs: tuple[bool, bool]
    ) -> AbstractContextManager[ExchangePass]:
        """The gradient of the sums. weighted: what the gradient of a weighted sum reads, and its weights. needs:
        whether the gradients of the rows, and of the experts' weights for the rows, are sent back."""
        ...


class Overlap(NamedTuple):
    """One call. width: of the experts' rows. prob_inside: the experts weight their rows, else the sum does."""

    exchange: RowExchange
    recipe: Recipe
    experts: Experts
    width: int
    out_dtype: torch.dtype
    prob_inside: bool

    def rows(self, name: TransferName, width: int, dtype: torch.dtype) -> Rows:
        return Rows.of(self.recipe, name, width, dtype)


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, call: Overlap, *parameters: Tensor | None) -> Tensor:
        need_x, need_probs, _, *need_parameters = ctx.needs_input_grad
        inside, home, saved = call.prob_inside, call.rows("combine", call.width, BF16), []
        needs = need_x, need_probs and inside, *need_parameters
        there = call.rows("dispatch", x.shape[1], x.dtype)
        with call.exchange.forward(x, probs if inside else None, there, home) as exchange_pass:
            experts = call.experts.quantized(parameters, needs)
            exchange_pass.depart()
            ends, no_prob = exchange_pass.ends(), torch.empty(0, dtype=torch.float32, device=x.device)
            for c, chunk in enumerate(exchange_pass.chunks):
                rows, prob = exchange_pass.operands(c)
                buffer, local = exchange_pass.return_buffer(c), [_part(p, chunk) for p in parameters]
                out_buffer = buffer[0] if home.rounding is None else None
                prob = no_prob if prob is None else prob
                out, state = experts.forward(chunk, rows, prob, ends[c], local, needs, out_buffer)
                home.write(out, buffer)
                saved.append(exchange_pass.clone_if_in_buffer(state))
                exchange_pass.send_back(c)
            weights = None if inside or probs is None else probs.contiguous()
            y, rows = exchange_pass.sums(call.out_dtype, weights)
        save(ctx, (tuple(saved), None if weights is None else (rows, weights)))
        ctx.call, ctx.needs, ctx.dim = call, needs, x.shape[1]
        ctx.dtypes = x.dtype, *(None if p is None else p.dtype for p in parameters)
        ctx.shapes = [None if p is None else p.shape for p in parameters]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, (need_x, need_prob, *_) = ctx.call, ctx.needs
        saved, weighted = saved_by(ctx)
        there = call.rows("combine_grad", call.width, BF16)
        home, steps = call.rows("dispatch_grad", ctx.dim, ctx.dtypes[0]), []
        needs = need_x, need_prob
        with call.exchange.backward(dequantized(grads[0]).contiguous(), weighted, there, home, needs) as exchange_pass:
            for c in range(len(exchange_pass.chunks)):
                dout, _ = exchange_pass.operands(c)
                step = call.experts.backward(saved[c], dout, ctx.dtypes, ctx.needs)
                buffer = exchange_pass.return_buffer(c)
                dx, dprob = step.inputs(buffer[0] if need_x and home.rounding is None else None)
                if dx is not None:
                    home.write(dx, buffer)
                if dprob is not None and need_prob:
                    buffer[-1].copy_(dprob.reshape(-1, 1))
                exchange_pass.send_back(c)
                steps.append(step)
            of_weights = lambda: _weight_gradients(ctx, exchange_pass.chunks, steps, grads[0].device)  # noqa: E731
            dx, dprobs, weights = exchange_pass.gradients(needs, of_weights)
        return dx, dprobs, None, *weights


def _part(parameter: Tensor | None, chunk: Chunk) -> Tensor | None:
    """Of the chunk's experts; of all experts the parameter itself."""
    if parameter is None or parameter.shape[0] == chunk.last - chunk.first:
        return parameter
    return parameter[chunk.first : chunk.last]


def _weight_gradients(
    ctx: Any, chunks: Sequence[Chunk], steps: list[Gradients], device: torch.device
) -> list[Tensor | None]:
    """Of all parameters; what the steps hold is freed one by one."""
    if len(chunks) == 1:
        return list(steps.pop().weights([None] * len(ctx.shapes)))
    # Memory for the gradients of the matrices, which the chunks write part by part.
    whole = [
        torch.empty(shape, dtype=dtype, device=device) if need and len(shape) == 3 else None
        for shape, dtype, need in zip(ctx.shapes, ctx.dtypes[1:], ctx.needs[2:], strict=True)
    ]
    found = []
    for chunk in chunks:
        found.append(steps.pop(0).weights([None if w is None else w[chunk.first : chunk.last] for w in whole]))
    return [
        None if of[0] is None else torch.cat(of) if w is None else w
        for w, of in zip(whole, zip(*found, strict=True), strict=True)
    ]


overlapped = differentiable("expert parallelism", _Overlapped)
"""overlapped(x, probs, call, *parameters): dispatch, experts and combine, unchecked."""
