"""The ops of the GPU table: what each runs on, the part of it that the CPU repeats, and the least it must move.

Case.program(call, *inputs)    one op or several, through the `call` of a frontend or of the CPU
Case.part(inputs, outputs, at) a slice of the outputs and inputs small enough to compute it on the CPU
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mxep.core_kernels.fold.plan_both import scratch_bytes
from mxep.core_kernels.formats import BLOCK, SPAN, spans
from torch import Tensor

from .shapes import Layer

Tensors = tuple[Tensor, ...]
Call = Callable[..., tuple[Any, ...]]  # name of an op, arrays, options -> outputs
Part = Callable[[Tensors, Tensors, slice], tuple[Tensors, Tensors]]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    rows, slice_: the CPU repeats a few slices of `slice_` of so many rows.
    formula: the peer's name in formulas.py and formulas_jax.py. read: bytes, if not all inputs once.
    magnitude: of small inputs, sum|terms| of the fp32 sums in the last output; the others are exact.
    scratch: bytes that the CUDA kernel needs besides inputs and outputs.
    """

    name: str
    shape: Mapping[str, int | str]
    inputs: Tensors
    program: Callable[..., tuple[Any, ...]]
    part: Part
    rows: int
    slice_: int = 32
    formula: str | None = None
    read: int | None = None
    by_bytes: bool = True
    magnitude: Callable[..., Tensor] | None = None
    scratch: int = 0

    def nbytes(self, outputs: Tensors) -> int:
        """The least bytes to read and to write."""
        read = sum(x.nbytes for x in self.inputs) if self.read is None else self.read
        return read + sum(out.nbytes for out in outputs)


def one(op: str, **options: int) -> Callable[..., tuple[Any, ...]]:
    return lambda call, *arrays: call(op, *arrays, **options)


# --- what the CPU repeats ---------------------------------------------------------------------------------


def rows_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """The same rows of every input; of a transposed output the columns that come from them."""
    m = len(inputs[0])

    def cut(out: Tensor) -> Tensor:
        return out[at] if len(out) == m else out[:, at.start * out.shape[1] // m : at.stop * out.shape[1] // m]

    return tuple(x[at] for x in inputs), tuple(map(cut, outputs))


def _gathered(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of x that `rows` names, and a map of its shape into them."""
    local = torch.arange(rows.numel(), dtype=torch.int32, device=rows.device).view_as(rows)
    return x[rows.flatten().clamp(min=0).long()], torch.where(rows < 0, -1, local)


def gather_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    x, row_map = inputs
    return _gathered(x, row_map[at]), tuple(out[at] for out in outputs)


def combine_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    rows, slots, probs = inputs
    return (*_gathered(rows, slots[at]), probs[at]), (outputs[0][at],)


def combine_bwd_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    dy, rows, slots, _, probs = inputs
    x, local = _gathered(rows, slots[at])
    drows, dprobs = outputs
    small_drows, _ = _gathered(drows, slots[at])
    return (dy[at], x, local, local.flatten(), probs[at]), (small_drows, dprobs[at])


def group_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """One of equal groups: the scale of a span follows from all of its group before."""
    (x, group_ends), (qf, row_sf, qf_t, span_sf) = inputs, outputs
    length = at.stop - at.start
    slot = at.start // SPAN + at.start // length
    slots = slice(slot, slot + spans(length, 1))
    return (x[at], group_ends[:1]), (qf[at], row_sf[at], qf_t[:, at], span_sf[slots])


def whole(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    return inputs, outputs


def _swiglu_terms(dh: Tensor, gate: Tensor, up: Tensor, prob: Tensor) -> Tensor:
    return (dh.double() * torch.nn.functional.silu(gate.double()) * up.double()).abs().sum(-1)


def _dot_terms(dy: Tensor, rows: Tensor, slots: Tensor, order: Tensor, probs: Tensor) -> Tensor:
    return (dy[:, None].double() * rows[slots.long()].double()).abs().sum(-1)


# --- the table -------------------------------------------------------------------------------------------


def values(*shape: int, device: str, octaves: float = 3) -> Tensor:
    """Normal values, bf16, whose rows differ in magnitude by `octaves` (one standard deviation), columns by a third."""
    rng = torch.Generator(device).manual_seed(sum(shape))
    rows = torch.randn(*shape[:-1], 1, generator=rng, device=device)
    columns = torch.randn(shape[-1], generator=rng, device=device)
    x = torch.randn(shape, generator=rng, device=device, dtype=torch.bfloat16)
    return x.mul_(torch.exp2(octaves * rows).bfloat16()).mul_(torch.exp2(octaves / 3 * columns).bfloat16())


def chosen_experts(layer: Layer, device: str) -> Tensor:
    """(T * K,) int32: every token's K different experts, some experts chosen more often than others."""
    rng = torch.Generator(device).manual_seed(layer.num_experts)
    logits = torch.randn(layer.tokens, layer.num_experts, generator=rng, device=device)
    logits += 0.5 * torch.randn(layer.num_experts, generator=rng, device=device)
    return logits.topk(layer.top_k).indices.flatten().int()


def matrix_cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    m, k = layer.tokens, layer.dim
    x = values(m, k, device=device)
    shape = {"M": m, "K": k}
    for op in ("quantize_row", "quantize_row_fold", "quantize_rowwise", "quantize_col", "quantize_both"):
        yield Case(op, shape, (x,), one(op), rows_part, m, formula=op)
    op, g, length = "quantize_both_fold", layer.local_experts, m // layer.local_experts // BLOCK * BLOCK
    ends = length * torch.arange(1, g + 1, dtype=torch.int32, device=device)
    yield Case(op, {**shape, "G": g}, (x, ends), one(op), group_part, g * length, length, op,
               scratch=scratch_bytes(m, k, g, "bfloat16"))  # fmt: skip
    yield Case("dequantize", shape, call("quantize_row", x), one("dequantize"), rows_part, m, formula="dequantize")
    yield from received_cases(layer, call, x)


def received_cases(layer: Layer, call: Call, x: Tensor) -> Iterator[Case]:
    m, g = layer.tokens, layer.local_experts
    rng = np.random.default_rng(m)
    pairs = layer.ranks * g
    counts = torch.from_numpy(rng.multinomial(m, rng.dirichlet(np.full(pairs, 4.0))).astype(np.int32)).to(x.device)
    row_map, inverse, *_ = call("row_map", counts, num_rows=m, num_local_experts=g)
    (packed,) = call("quantize_row_packed", x)
    shape = {"M": m, "K": layer.dim, "G": g, "ranks": layer.ranks, "routing": "skewed"}
    p, read = len(row_map), m * packed.shape[1] + row_map.nbytes
    yield Case("permute_mx", shape, (packed, row_map), one("permute_mx"), gather_part, p, read=read,
               formula="permute_mx")  # fmt: skip
    del packed
    (padded,) = call("permute_rows", x, row_map)
    yield Case("unpermute", shape, (padded, inverse), one("permute_rows"), gather_part, m,
               read=x.nbytes + inverse.nbytes, formula="permute_rows")  # fmt: skip


def weight_cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    g, n, k = layer.local_experts, layer.hiddens[0], layer.dim
    w = values(g, n, k, device=device)
    for direction in ("row", "col"):
        shape = {"G": g, "N": n, "K": k, "layout": direction}
        yield Case("quantize_weights", shape, (w,), one(f"quantize_{direction}"), rows_part, g, slice_=1)


def swiglu_cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    m = layer.tokens
    prob = torch.rand(m, generator=torch.Generator(device).manual_seed(m), device=device)
    for f in layer.hiddens:
        gate, up, dh = values(3, m, f, device=device, octaves=0.5)
        shape = {"M": m, "F": f}
        # Peers are compiled for the first width alone: the second would double the time of a run.
        compiled = f == layer.hiddens[0]
        yield Case("swiglu_row_fwd", shape, (gate, up, prob), one("swiglu_row"), rows_part, m,
                   formula="swiglu_row" if compiled else None)  # fmt: skip
        for kind in ("row", "both"):
            yield Case(f"swiglu_{kind}_bwd", shape, (dh, gate, up, prob), one(f"swiglu_bwd_{kind}"), rows_part, m,
                       formula=f"swiglu_bwd_{kind}" if compiled else None, magnitude=_swiglu_terms)  # fmt: skip


def routing_cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    ids = chosen_experts(layer, device)

    def program(call: Call, ids: Any) -> tuple[Any, ...]:
        """Sort the slots, and map what an all-to-all would deliver: the counts stand for those of all ranks."""
        order, inverse, counts = call("sort_by_expert", ids, num_experts=layer.num_experts)
        maps = call("row_map", counts, num_rows=len(ids), num_local_experts=layer.local_experts)
        return (order, inverse, counts, *maps)

    shape = {"M": layer.tokens, "top_k": layer.top_k, "experts": layer.num_experts, "routing": "skewed"}
    yield Case("routing", shape, (ids,), program, whole, 1, formula="routing", by_bytes=False)


def combine_cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    """Rows in the order of a sort by expert, as they come back from the experts."""
    order, slots, _ = call("sort_by_expert", chosen_experts(layer, device), num_experts=layer.num_experts)
    slots = slots.view(layer.tokens, layer.top_k)
    rows = values(len(order), layer.dim, device=device)
    rng = torch.Generator(device).manual_seed(1)
    probs = torch.randn(slots.shape, generator=rng, device=device).softmax(-1)
    shape = {"M": layer.tokens, "K": layer.dim, "top_k": layer.top_k}
    yield Case("combine", {**shape, "direction": "fwd"}, (rows, slots, probs), one("combine"), combine_part,
               layer.tokens, formula="combine")  # fmt: skip
    dy = values(layer.tokens, layer.dim, device=device)
    yield Case("combine", {**shape, "direction": "bwd"}, (dy, rows, slots, order, probs), one("combine_bwd"),
               combine_bwd_part, layer.tokens, formula="combine_bwd", magnitude=_dot_terms)  # fmt: skip


# By the ops that each makes, so that `--only` builds no inputs in vain.
FAMILIES: dict[tuple[str, ...], Callable[[Layer, Call, str], Iterator[Case]]] = {
    ("quantize_row", "quantize_row_fold", "quantize_rowwise", "quantize_col", "quantize_both",
     "quantize_both_fold", "dequantize", "permute_mx", "unpermute"): matrix_cases,
    ("quantize_weights",): weight_cases,
    ("routing",): routing_cases,
    ("swiglu_row_fwd", "swiglu_row_bwd", "swiglu_both_bwd"): swiglu_cases,
    ("combine",): combine_cases,
}  # fmt: skip


def cases(layer: Layer, call: Call, device: str, only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Every case, or those of the ops named."""
    for names, make in FAMILIES.items():
        if not only or set(only) & set(names):
            yield from (case for case in make(layer, call, device) if not only or case.name in only)
