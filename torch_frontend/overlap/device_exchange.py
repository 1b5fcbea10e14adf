"""Expert parallelism whose exchange the device drives, overlapped with the products: of recipe "mxfp8" on Hopper.

    forward    packed rows, order, weights --> own memory | share counts, MEET | CudaProgram | MEET | sums of slots
    backward   packed gradients            --> own memory | MEET               | CudaProgram | MEET | sums of slots

core_kernels/peer/programs/ffn.py draws the programs of a feed-forward, mm.py the programs of one product. The
experts' ranks pull rows out of the tokens' ranks, and push results into the slot [token][k] of the token's rank. One
call launches all steps between two meetings, and the host reads no size before. The result and all gradients have the
bytes of `dispatch`, experts and `combine` without overlap.

A call of several rounds (rounds.py) repeats from the MEET on with another order, and sums the slots once. Its backward
repeats the forward of the later rounds, which pushes nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import cpp_bindings
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
from .rank_rows import RankRows, run_first_round
from .rounds import Later

HOPPER = (9, 0)
Results = dict[str, Tensor]
"""Of a program of the forward."""


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

        def write(call: DeviceCall) -> None:
            call.rows.write(x, call.packed(call.sizes.dim))
            call.rows.write_order(order, probs)

        def run(call: DeviceCall, table: Tensor) -> Results:
            return call.prepared(quantize, results)(memory, call.given_forward(table, weights))

        with memory.mapped.uninterrupted():
            call, found, of_all = run_first_round(call, counts, write, run)
            later = call.rows.later(of_all)
            for of_round in later:
                _later_round(call, of_round, None, probs, order, weights, ())
            memory.mapped.barrier()
            y = call.sums(found["sources"], call.width, torch.bfloat16)
        if results:
            saved, cached = _of(found, names.saved), () if call.gathered else tuple(call.operands(True).values())
            operands = _of(found, results[len(saved) :]) or cached or None
            values = weights if later or not (operands or call.gathered) else None
            layout = found["group_ends"], found["sources"]
            save(ctx, (layout, saved, operands, values, (x, probs, order) if later else None))
            ctx.call, ctx.of_all, ctx.dtype = call.copied() if later else call, of_all if later else None, x.dtype
            ctx.probs = probs is not None and ctx.needs_input_grad[1]
        ctx.mark_non_differentiable(found["totals"])
        return y, found["totals"]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: DeviceCall = ctx.call
        (group_ends, sources), saved, operands, values, inputs = saved_by(ctx)
        if call.gathered:
            operands = tuple(call.operands(True).values())
        memory, rows, names = call.memory, call.rows, call.programs
        of_weights = dict(zip(names.along_n, operands, strict=True)) if operands else {}
        of_weights |= dict(zip(names.weights, values, strict=True)) if values else {}
        gradients = call.packed(call.width)
        with memory.mapped.uninterrupted():
            program = call.prepared(operands is None, None)
            rows.write(dequantized(grads[0]).to(torch.bfloat16), gradients)
            memory.mapped.barrier()
            given = dict(zip(names.saved, saved, strict=True)) | call.given() | of_weights
            del saved
            found = tuple(program(memory, given | {"group_ends": group_ends}).values())
            del given
            for of_round in rows.later(ctx.of_all):
                x, probs, order = inputs
                again = _later_round(call, of_round, x, probs, order, values, names.saved)
                memory.mapped.barrier()
                rows.write(dequantized(grads[0]).to(torch.bfloat16), gradients)
                memory.mapped.barrier()
                given = again | call.given() | of_weights
                del again
                of_round.add(found, tuple(program(memory, given).values()))
                del given
            del operands, values, of_weights
            memory.mapped.barrier()
            dx = call.sums(sources, call.sizes.dim, ctx.dtype)
            dprobs = rows.numbers(sources) if ctx.probs else None
        return dx, dprobs, None, None, None, *found


def _of(found: Results, names: Sequence[str]) -> tuple[Tensor, ...]:
    return tuple(found[name] for name in names)


def _later_round(
    call: DeviceCall, of_round: Later, x: Tensor | None, probs: Tensor | None, order: Tensor | None,
    weights: Sequence[Tensor], results: tuple[str, ...],
) -> Results:  # fmt: skip
    """The results of the program of the forward, which pushes nothing if there are any. x: None if this rank's memory
    has it."""
    memory, rows = call.memory, call.rows
    memory.mapped.barrier()  # no rank reads rows and order of the round before any more
    if x is not None:
        rows.write(x, call.packed(call.sizes.dim))
    rows.write_order(order, probs, of_round.rows)
    memory.mapped.barrier()
    program = call.prepared(call.cached[0] is None, results, push=not results)
    return program(memory, call.given_forward(of_round.counts, weights))


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


def call_of(rows: RankRows, request: Request, found: LocalExperts) -> DeviceCall:
    experts, w, memory = found.experts, found.parameters[0], rows.memory
    assert w is not None
    groups, hidden, dim = w.shape  # of w1, or (G, N, K)
    if isinstance(experts, FFNExperts):
        programs, numbers, kept = FFN, tuple(experts.call.numbers), experts.call.save_bytes
    else:
        programs, numbers, kept = MM, (), outlives_forward(w)
    sizes = Sizes(
        memory.rank, memory.ranks, groups, rows.capacity, dim, hidden, rows.top_k, dtype_name(w.dtype),
        int(request.recipe.rounding), numbers,
    )  # fmt: skip
    return DeviceCall(rows, programs, sizes, found.width, _cached(found), kept)


def run(
    call: DeviceCall, request: Request, x: Tensor, probs: Tensor | None, parameters: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """(T, width) bfloat16, and rows of all ranks per expert."""
    weights, _ = _weights_and_biases(parameters)
    order = request.rows.order if isinstance(request.rows, TokenReplicas) else None
    return _device_experts(x, probs, call, order, request.counts.to(torch.int32), *weights)
