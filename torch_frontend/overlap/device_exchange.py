"""Expert parallelism whose exchange the device drives, overlapped with the products: of recipe "mxfp8" on Hopper.

    forward    packed rows, order, weights --> own memory | share counts, MEET | CudaProgram | MEET | sums of slots
    backward   packed gradients            --> own memory | MEET               | CudaProgram | MEET | sums of slots

core_kernels/peer/programs/ffn.py draws the programs of a feed-forward, mm.py the programs of one product. The
experts' ranks pull rows out of the tokens' ranks, and push results into the slot [token][k] of the token's rank. One
call launches all steps between two meetings, and the host reads no size before. The result and all gradients have the
bytes of `dispatch`, experts and `combine` without overlap.

A call of several rounds (rounds.py) repeats from the MEET on with another order, and sums the slots once. Its backward
repeats the forward of the later rounds.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import cpp_bindings
from ...core_kernels.oracle_math import Array
from ...core_kernels.peer.programs import ffn
from ...core_kernels.peer.programs.mm import takes_mm
from ...core_kernels.peer.programs.writer import Sizes
from ..exchange.all_to_all import TokenReplicas
from ..exchange.counts import Request
from ..ops.device import compute_capability, forced
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.launch import dtype_name
from ..ops.mx_tensor import dequantized
from ..ops.private import exchange
from ..products.forms.fold import Folded
from ..products.gathered_weights import GatheredBytes, GatheredWeights
from ..products.weights import Cached, is_transpose, outlives_forward
from .device_call import FFN, MM, DeviceCall
from .local_experts import FFNExperts, LocalExperts, MMExperts
from .peer_exchange import Layout, lay_out, share_counts
from .rounds import Later, start_reading

if TYPE_CHECKING:
    from .peer_memory import PeerMemory

HOPPER = (9, 0)
LAYOUT = "positions", "group_ends", "filled_ends", "totals"


class _DeviceExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, call: DeviceCall, order: Tensor | None, counts: Tensor,
        *weights: Tensor,
    ) -> Any:  # fmt: skip
        memory, names = call.memory, call.programs
        quantize = call.cached[0] is None
        results = () if not any(ctx.needs_input_grad) else names.saved
        results += names.along_n if results and quantize and call.kept else ()
        with memory.uninterrupted():
            call, layout, found, of_all = _first_round(call, x, probs, order, counts, weights, results)
            later = call.later(of_all)
            for of_round in later:
                _later_round(call, of_round, None, probs, order, weights, ())
            if later:
                layout.positions.zero_()[later[0].total :] = -1  # all rows of the counts have slots now
            memory.barrier()
            y = call.sums(layout, call.prepared(quantize, results)[1], call.width, torch.bfloat16)
        if results:
            saved, cached = found[: len(names.saved)], () if call.gathered else tuple(call.operands(True).values())
            operands = found[len(saved) :] or cached or None
            values = weights if later or not (operands or call.gathered) else None
            save(ctx, (_tensors_of(layout), saved, operands, values, (x, probs, order) if later else None))
            ctx.call, ctx.of_all, ctx.dtype = call.copied() if later else call, of_all if later else None, x.dtype
            ctx.probs = probs is not None and ctx.needs_input_grad[1]
        ctx.mark_non_differentiable(layout.totals)
        return y, layout.totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: DeviceCall = ctx.call
        layout, saved, operands, values, inputs = saved_by(ctx)
        if call.gathered:
            operands = tuple(call.operands(True).values())
        memory, sizes, names = call.memory, call.sizes, call.programs
        layout = Layout(**dict(zip(LAYOUT, layout, strict=True)), capacity=sizes.rows)
        of_weights = dict(zip(names.along_n, operands, strict=True)) if operands else {}
        of_weights |= dict(zip(names.weights, values, strict=True)) if values else {}
        with memory.uninterrupted():
            program, places = call.prepared(operands is None, None)
            call.write_rows(dequantized(grads[0]).to(torch.bfloat16), places)
            memory.barrier()
            given = dict(zip(names.saved, saved, strict=True)) | call.given(layout) | of_weights
            del saved
            found = program(memory, given)
            del given
            for of_round in call.later(ctx.of_all):
                x, probs, order = inputs
                again, saved = _later_round(call, of_round, x, probs, order, values, names.saved)
                memory.barrier()
                call.write_rows(dequantized(grads[0]).to(torch.bfloat16), places)
                memory.barrier()
                given = dict(zip(names.saved, saved, strict=True)) | call.given(again) | of_weights
                del saved
                of_round.add(found, program(memory, given))
                del given
            del operands, values, of_weights
            memory.barrier()
            dx = call.sums(layout, places, sizes.dim, ctx.dtype)
            dprobs = call.numbers(layout, places) if ctx.probs else None
        return dx, dprobs, None, None, None, *found


def _first_round(
    call: DeviceCall, x: Tensor, probs: Tensor | None, order: Tensor | None, counts: Tensor,
    weights: Sequence[Tensor], results: tuple[str, ...],
) -> tuple[DeviceCall, Layout, tuple[Tensor, ...], Array | None]:  # fmt: skip
    """The call with its memory, the layout of its rows, the results of its program, and the counts of all ranks if
    there may be later rounds. The host reads the counts when it has launched the program."""
    while True:
        memory, fits = call.memory, call.slots <= call.room
        program, places = call.prepared(call.cached[0] is None, results)
        if fits:
            call.write_rows(x, places)
            call.write_order(order, probs, places)
        # Negative counts are of no row: all ranks enlarge their memory, and begin again.
        table = share_counts(memory, counts if fits else ~counts)
        layout = lay_out(memory, table, call.slots, call.sizes.rows, call.alignment)
        read = start_reading(table) if memory.rounds else None
        found = program(memory, call.given_forward(layout, table, weights))
        if read is None:
            return call, layout, found, None
        of_all = read()
        enlarged = call.enlarged(of_all)
        if enlarged is None:
            return call, layout, found, of_all
        call = enlarged


def _later_round(
    call: DeviceCall, of_round: Later, x: Tensor | None, probs: Tensor | None, order: Tensor | None,
    weights: Sequence[Tensor], results: tuple[str, ...],
) -> tuple[Layout, tuple[Tensor, ...]]:  # fmt: skip
    """The layout of its rows, and the results of the program of the forward. x: None if this rank's memory has it."""
    memory = call.memory
    program, places = call.prepared(call.cached[0] is None, results)
    memory.barrier()  # no rank reads rows and order of the round before any more
    if x is not None:
        call.write_rows(x, places)
    call.write_order(order, probs, places, of_round.rows)
    memory.barrier()
    layout = lay_out(memory, of_round.counts, len(of_round.rows), call.sizes.rows, call.alignment)
    return layout, program(memory, call.given_forward(layout, of_round.counts, weights))


def _tensors_of(layout: Layout) -> tuple[Tensor, ...]:
    return tuple(getattr(layout, name) for name in LAYOUT)


_device_experts = differentiable("expert parallelism", _DeviceExperts)


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
    experts, x = found.experts, request.x
    weights, biases = _weights_and_biases(found.parameters)
    form = experts.call.options.form
    grads = [t is not None and t.requires_grad for t in (x, *weights)]
    kinds = {w.dtype for w in weights if w is not None}
    quantized = {_whole(cached) for cached in _cached(found)}
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
        and all(bias is None for bias in biases)
        and not experts.call.options.pad
        and (not torch.is_grad_enabled() or all(grads) or not any(grads))
        and len(kinds) == 1
        and (quantized == {True} or (quantized == {None} and kinds == {torch.bfloat16}))
        and all(w is not None and w.is_contiguous() and not is_transpose(w) for w in weights)
        and (_takes_mm if isinstance(experts, MMExperts) else _takes_ffn)(request, found)
    )


def _takes_ffn(request: Request, found: LocalExperts) -> bool:
    experts, w1, dim = found.experts, found.parameters[0], request.x.shape[1]
    assert isinstance(experts, FFNExperts)
    if not isinstance(request.rows, TokenReplicas) or not request.inside or experts.call.recompute or w1 is None:
        return False
    groups, hidden, _ = w1.shape
    return dim == found.width and ffn.takes_ffn(groups, dim, hidden)


def _takes_mm(request: Request, found: LocalExperts) -> bool:
    w = found.parameters[0]
    return w is not None and request.probs is None and takes_mm(request.ranks.degree, *w.shape)


def _whole(cached: Cached | GatheredBytes) -> bool | None:
    """Whether cached weights have both operands folded, or gathered ones the forward's; None without."""
    if cached is None:
        return None
    if isinstance(cached, GatheredBytes):
        return isinstance(cached.along_k, Folded)
    return isinstance(cached.along_k, Folded) and isinstance(cached.along_n, Folded)


def _cached(found: LocalExperts) -> tuple[Cached | GatheredBytes, ...]:
    """Of each weight."""
    experts, (weights, _) = found.experts, _weights_and_biases(found.parameters)
    cached = experts.cached if isinstance(experts, FFNExperts) else (experts.cached,)
    pairs = zip(weights, cached, strict=True)
    return tuple(w.gathered if isinstance(w, GatheredWeights) else of for w, of in pairs)


def _weights_and_biases(parameters: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    half = len(parameters) // 2
    return parameters[:half], parameters[half:]


def call_of(memory: "PeerMemory", request: Request, found: LocalExperts, capacity: int, room: int) -> DeviceCall:
    """capacity: rows of an operand. room: as of DeviceCall."""
    experts, w, rows, recipe = found.experts, found.parameters[0], request.rows, request.recipe
    assert w is not None
    groups, hidden, dim = w.shape  # of w1, or (G, N, K)
    inverse, top_k = (rows.inverse, rows.top_k) if isinstance(rows, TokenReplicas) else (None, 1)
    if isinstance(experts, FFNExperts):
        programs, numbers, kept = FFN, tuple(experts.call.numbers), experts.call.save_bytes
    else:
        programs, numbers, kept = MM, (), outlives_forward(w)
    sizes = Sizes(
        memory.rank, memory.ranks, groups, capacity, dim, hidden, top_k, dtype_name(w.dtype), int(recipe.rounding),
        numbers,
    )  # fmt: skip
    tokens, cached = request.x.shape[0], _cached(found)
    return DeviceCall(memory, programs, tokens, inverse, sizes, found.width, recipe.alignment, cached, kept, room)


def run(
    call: DeviceCall, request: Request, x: Tensor, probs: Tensor | None, parameters: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """(T, width) bfloat16, and rows of all ranks per expert."""
    weights, _ = _weights_and_biases(parameters)
    order = request.rows.order if isinstance(request.rows, TokenReplicas) else None
    return _device_experts(x, probs, call, order, request.counts, *weights)
