"""Expert parallelism whose exchange the device drives, overlapped with the products: of recipe "mxfp8" on Hopper.

    forward    packed rows, order, weights --> own memory | share counts, MEET | CudaProgram | MEET | sums of slots
    backward   packed gradients            --> own memory | MEET               | CudaProgram | MEET | sums of slots

core_kernels/peer/schedule.py draws the programs of a feed-forward, programs/mm.py the programs of one product. The
experts' ranks pull rows out of the tokens' ranks, and push results into the slot [token][k] of the token's rank. The
host reads no size; one call launches all steps between two meetings. The result and all gradients have the bytes of
`dispatch`, experts and `combine` without overlap.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import cpp_bindings
from ...core_kernels.peer import schedule
from ...core_kernels.peer.programs.mm import takes_mm
from ...core_kernels.peer.schedule import Sizes
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
from .peer_exchange import Layout, lay_out

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
        memory, sizes, names = call.memory, call.sizes, call.programs
        quantize = call.cached[0] is None
        with memory.uninterrupted():
            results = () if not any(ctx.needs_input_grad) else names.saved
            results += names.along_n if results and quantize and call.kept else ()
            program, places = call.prepared(quantize, results)
            call.write_rows(x, places)
            call.write_order(order, probs, places)
            layout = lay_out(memory, counts, call.slots, sizes.rows, call.alignment)
            given = {"counts": memory.counts(sizes.groups * sizes.ranks), **call.given(layout)}
            given |= dict(zip(names.weights, weights, strict=True)) | call.operands(False)
            found = program(memory, given)
            memory.barrier()
            y = call.sums(layout, places, call.width, torch.bfloat16)
        if results:
            saved, cached = found[: len(names.saved)], () if call.gathered else tuple(call.operands(True).values())
            operands = found[len(saved) :] or cached or None
            save(ctx, (_tensors_of(layout), saved, operands, None if operands or call.gathered else weights))
            ctx.call, ctx.probs, ctx.dtype = call, probs is not None and ctx.needs_input_grad[1], x.dtype
        ctx.mark_non_differentiable(layout.totals)
        return y, layout.totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: DeviceCall = ctx.call
        layout, saved, operands, values = saved_by(ctx)
        if call.gathered:
            operands = tuple(call.operands(True).values())
        memory, sizes, names = call.memory, call.sizes, call.programs
        layout = Layout(**dict(zip(LAYOUT, layout, strict=True)), capacity=sizes.rows)
        with memory.uninterrupted():
            program, places = call.prepared(operands is None, None)
            call.write_rows(dequantized(grads[0]).to(torch.bfloat16), places)
            memory.barrier()
            given = dict(zip(names.saved, saved, strict=True)) | call.given(layout)
            given |= dict(zip(names.along_n, operands, strict=True)) if operands else {}
            given |= dict(zip(names.weights, values, strict=True)) if values else {}
            del saved, operands, values
            found = program(memory, given)
            del given
            memory.barrier()
            dx = call.sums(layout, places, sizes.dim, ctx.dtype)
            dprobs = call.numbers(layout, places) if ctx.probs else None
        return dx, dprobs, None, None, None, *found


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
    return dim == found.width and schedule.takes(groups, dim, hidden)


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


def call_of(memory: "PeerMemory", request: Request, found: LocalExperts, capacity: int) -> DeviceCall:
    """capacity: rows of an operand."""
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
    return DeviceCall(memory, programs, tokens, inverse, sizes, found.width, recipe.alignment, cached, kept)


def run(
    call: DeviceCall, request: Request, x: Tensor, probs: Tensor | None, parameters: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """(T, width) bfloat16, and rows of all ranks per expert."""
    weights, _ = _weights_and_biases(parameters)
    order = request.rows.order if isinstance(request.rows, TokenReplicas) else None
    return _device_experts(x, probs, call, order, request.counts, *weights)
