"""Expert parallelism whose exchange the device drives, overlapped with the products: of recipe "mxfp8" on Hopper.

    forward    packed rows, order, weights --> own memory | share counts, MEET | CudaProgram | MEET | sums of slots
    backward   packed gradients            --> own memory | MEET               | CudaProgram | MEET | sums of slots

core_kernels/peer/schedule.py draws the two programs. The experts' ranks pull rows out of the tokens' ranks, and push
results into the slot [token][k] of the token's rank. The host reads no size; one call launches all steps between two
meetings. The result and all gradients have the bytes of `dispatch`, experts and `combine` without overlap.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import cpp_bindings
from ...core_kernels.dispatch import facts
from ...core_kernels.formats import packed_width
from ...core_kernels.launch import ArrayType
from ...core_kernels.peer import plan, schedule
from ...core_kernels.peer.schedule import OPERANDS, SAVED, TRANSPOSED, Memory, Program, Sizes
from ...core_kernels.registry import OPS
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request
from ..ops.call import call_out
from ..ops.device import arch_of, compute_capability, forced
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.launch import dtype_name
from ..ops.mx_tensor import dequantized
from ..ops.private import exchange
from ..products.forms.fold import Folded
from ..products.weights import Cached, is_transpose
from .local_experts import FFNExperts, LocalExperts
from .peer_exchange import Layout, lay_out

if TYPE_CHECKING:
    from .peer_memory import PeerMemory

HOPPER = (9, 0)
LAYOUT = "positions", "group_ends", "filled_ends", "totals"


class Prepared(NamedTuple):
    """A program on a device. results: the shapes and dtypes of its results."""

    program: Program
    launch: Any
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, program: Program, device: torch.device) -> "Prepared":
        types = [(array.shape, array.dtype) for array in program.arrays.values()]
        places = [program.places.get(name, -1) for name in program.arrays]
        assert exchange is not None
        launch = cpp_bindings.CudaProgram(exchange, device.index, types, places, program.steps)
        return cls(program, launch, tuple(_torch_type(program.arrays[name]) for name in program.results))

    def __call__(self, memory: "PeerMemory", given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The results."""
        program, device = self.program, memory.device
        results = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.results)
        buffer = torch.empty(program.nbytes, dtype=torch.uint8, device=device)
        passed = given | dict(zip(program.results, results, strict=True))
        passed = tuple(passed[name] for name in program.arrays if name not in program.places)
        self.launch(passed, buffer, memory.side_stream)
        return results


def _torch_type(array: ArrayType) -> tuple[tuple[int, ...], torch.dtype]:
    return array.shape, getattr(torch, array.dtype)


class DeviceCall(NamedTuple):
    """What the forward and the backward of a call need. kept: operands along N live until the backward. Not the rows:
    they would live as long as the graph of the result."""

    memory: "PeerMemory"
    tokens: int
    inverse: Tensor
    sizes: Sizes
    alignment: int
    cached: tuple[Cached, ...]
    kept: bool

    def prepared(self, quantize: bool, results: Sequence[str] | None) -> tuple[Prepared, Memory]:
        """The program of the forward with these results, or of the backward, and the memory that it knows."""
        memory = self.memory
        assert memory.buffer is not None
        places = Memory.of(memory.buffer.starts[1], self.sizes.rows, self.sizes.top_k, self.sizes.dim)
        key = results, quantize, self.sizes, places
        if key not in memory.programs:
            if results is None:
                program = schedule.write_backward(self.sizes, places, quantize)
            else:
                program = schedule.write_forward(self.sizes, places, quantize, results)
            memory.programs[key] = Prepared.of(program, memory.device)
        return memory.programs[key], places

    def write_rows(self, x: Tensor, places: Memory) -> None:
        """Packed MXFP8 rows to this rank's memory."""
        t, width = x.shape[0], packed_width(x.shape[1])
        packed = self._own(places.rows, (t, width), torch.uint8)
        call_out((packed,), OPS["quantize_row_packed"], x.contiguous(), rounding=self.sizes.rounding)

    def write_order(self, order: Tensor, probs: Tensor | None, places: Memory) -> None:
        self._own(places.order, order.shape, torch.int32).copy_(order)
        weights = self._own(places.weights, order.shape, torch.float32)
        if probs is None:
            weights.fill_(1.0)
        else:
            torch.index_select(probs.reshape(-1), 0, order, out=weights)

    def sums(self, layout: Layout, places: Memory, dtype: torch.dtype) -> Tensor:
        """(T, D): the sum of each token's slots, NaN if a row exceeded a capacity."""
        memory, t, k = self.memory, self.tokens, self.sizes.top_k
        y = torch.empty((t, self.sizes.dim), dtype=dtype, device=memory.device)
        hw_cast = memory.device.type == "cuda" and facts(arch_of(memory.device)).hw_cast
        memory.launch(
            "pull", min(t, memory.width), self.inverse, layout.positions, self._own_address(), t, places.slots, 0,
            y, **plan.pull(self.sizes.dim, k, True, False, False, hw_cast) | {"SLOTS": True},
        )  # fmt: skip
        return y

    def numbers(self, layout: Layout, places: Memory) -> Tensor:
        """(T, k) fp32 of the slots."""
        out = torch.empty((self.tokens, self.sizes.top_k), dtype=torch.float32, device=self.memory.device)
        self.memory.launch(
            "pull_weights", -(-out.numel() // 256), self.inverse, layout.positions, self._own_address(),
            out.numel(), places.numbers, out, BLOCK_M=256, SLOTS=True,
        )  # fmt: skip
        return out

    def addresses(self) -> dict[str, Tensor]:
        buffer = self.memory.buffer
        assert buffer is not None
        return dict.fromkeys(schedule.ADDRESSES, buffer.addresses.view(torch.int32).view(-1, 2))

    def _own_address(self) -> Tensor:
        buffer, rank = self.memory.buffer, self.memory.rank
        assert buffer is not None
        return buffer.addresses[rank : rank + 1]

    def _own(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memory.own[start : start + nbytes].view(dtype).view(shape)


class _DeviceFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, call: DeviceCall, order: Tensor, counts: Tensor, *weights: Tensor
    ) -> Any:
        memory, sizes = call.memory, call.sizes
        quantize = call.cached[0] is None
        with memory.uninterrupted():
            results = () if not any(ctx.needs_input_grad) else SAVED
            results += TRANSPOSED if results and quantize and call.kept else ()
            program, places = call.prepared(quantize, results)
            call.write_rows(x, places)
            call.write_order(order, probs, places)
            layout = lay_out(memory, counts, order.shape[0], sizes.rows, call.alignment)
            experts = sizes.groups * sizes.ranks
            given = {"counts": memory.counts(experts), "group_ends": layout.group_ends, **call.addresses()}
            given |= dict(zip(("w1", "w3", "w2"), weights, strict=True)) | _operands(call.cached, 0)
            given["no_numbers"] = torch.empty(0, dtype=torch.float32, device=memory.device)
            found = program(memory, given)
            memory.barrier()
            y = call.sums(layout, places, torch.bfloat16)
        if results:
            cached = tuple(_operands(call.cached, 1).values())
            operands = found[len(SAVED) :] or cached or None
            save(ctx, (_tensors_of(layout), found[: len(SAVED)], operands, None if operands else weights))
            ctx.call, ctx.probs, ctx.dtype = call, probs is not None and ctx.needs_input_grad[1], x.dtype
        ctx.mark_non_differentiable(layout.totals)
        return y, layout.totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: DeviceCall = ctx.call
        layout, saved, operands, values = saved_by(ctx)
        memory, layout = call.memory, Layout(**dict(zip(LAYOUT, layout, strict=True)), capacity=call.sizes.rows)
        with memory.uninterrupted():
            program, places = call.prepared(operands is None, None)
            call.write_rows(dequantized(grads[0]).to(torch.bfloat16), places)
            memory.barrier()
            given = dict(zip(SAVED, saved, strict=True))
            given |= {"group_ends": layout.group_ends, **call.addresses()}
            given |= dict(zip(TRANSPOSED, operands, strict=True)) if operands else {}
            given |= dict(zip(("w1", "w3", "w2"), values, strict=True)) if values else {}
            del saved, operands, values
            found = program(memory, given)
            del given
            memory.barrier()
            dx = call.sums(layout, places, ctx.dtype)
            dprobs = call.numbers(layout, places) if ctx.probs else None
        return dx, dprobs, None, None, None, *found


def _tensors_of(layout: Layout) -> tuple[Tensor, ...]:
    return tuple(getattr(layout, name) for name in LAYOUT)


def _operands(cached: Sequence[Cached], which: int) -> dict[str, Tensor]:
    """Of w1, w3, w2: along K (0) or along N (1), by name; nothing without cached weights."""
    if cached[0] is None:
        return {}
    parts = [part for w in cached if w is not None for part in w[which]]
    return dict(zip((OPERANDS, TRANSPOSED)[which], parts, strict=True))


_device_ffn = differentiable("expert parallelism", _DeviceFFN)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels of the programs run on the device, and may."""
    return (
        device.type == "cuda"
        and compute_capability(device) == HOPPER
        and not cpp_bindings.why_not_cuda("grouped_mm_fold", HOPPER)
        and exchange is not None
        and forced() in (None, "cuda")
    )


def takes(request: Request, found: LocalExperts, device: torch.device) -> bool:
    """Whether the device drives the exchange of a call; the same on all ranks."""
    experts, rows, dims = found.experts, request.rows, found.width
    if not isinstance(experts, FFNExperts) or not isinstance(rows, TokenReplicas) or not request.inside:
        return False
    x, (*weights, b1, b3, b2) = rows.x, found.parameters
    call, form = experts.call, experts.call.options.form
    grads = [t is not None and t.requires_grad for t in (x, *weights)]
    kinds = {w.dtype for w in weights if w is not None}
    quantized = {_whole(cached) for cached in experts.cached}
    groups, hidden = (0, 0) if weights[0] is None else weights[0].shape[:2]
    return (
        runs_on(device)
        and form.name == "fold"
        and form.wgrad_mx
        and request.recipe.sends_mx("dispatch")
        and request.recipe.sends_mx("combine_grad")
        and not request.recipe.sends_mx("combine")
        and not request.recipe.sends_mx("dispatch_grad")
        and request.out_dtype == torch.bfloat16
        and x.dtype == torch.bfloat16
        and b1 is None and b3 is None and b2 is None
        and not call.recompute
        and not call.options.pad
        and (not torch.is_grad_enabled() or all(grads) or not any(grads))
        and len(kinds) == 1
        and (quantized == {True} or (quantized == {None} and kinds == {torch.bfloat16}))
        and all(w is not None and w.is_contiguous() and not is_transpose(w) for w in weights)
        and x.shape[1] == dims
        and schedule.takes(groups, dims, hidden)
    )  # fmt: skip


def _whole(cached: Cached) -> bool | None:
    """Whether cached weights have both operands folded; None without."""
    if cached is None:
        return None
    return isinstance(cached.along_k, Folded) and isinstance(cached.along_n, Folded)


def run(
    call: DeviceCall, request: Request, x: Tensor, probs: Tensor | None, parameters: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """(T, D) bfloat16, and rows of all ranks per expert."""
    w1, w3, w2, *_ = parameters
    assert isinstance(request.rows, TokenReplicas)
    return _device_ffn(x, probs, call, request.rows.order, request.counts, w1, w3, w2)


def sizes_of(memory: "PeerMemory", request: Request, found: LocalExperts, capacity: int) -> Sizes:
    experts, w1, rows = found.experts, found.parameters[0], request.rows
    assert isinstance(experts, FFNExperts)
    assert isinstance(rows, TokenReplicas)
    assert w1 is not None
    groups, hidden, dim = w1.shape
    rounding = int(request.recipe.rounding)
    return Sizes(
        memory.rank, memory.ranks, groups, capacity, dim, hidden, rows.top_k, dtype_name(w1.dtype), rounding,
        tuple(experts.call.numbers),
    )  # fmt: skip
