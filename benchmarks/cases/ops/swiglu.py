"""Cases of the family `swiglu`: forward along rows, or folded; backward along rows, both dims, or these and h, also
folded."""

from collections.abc import Iterator

import torch
from mxep.core_kernels.formats import BLOCK, SPAN, spans
from mxep.core_kernels.swiglu.folded.plan_bwd import scratch_words, swiglu_bwd_fold
from torch import Tensor

from ..case import Call, Case, Tensors, one, rows_part, values
from ..shapes import Layer

OPS = (
    *("swiglu_row_fwd", "swiglu_row_fold_fwd"),
    *("swiglu_row_bwd", "swiglu_both_bwd", "swiglu_all_bwd", "swiglu_fold_bwd"),
)


def _prob_gradient_terms(dh: Tensor, gate: Tensor, up: Tensor, *_: Tensor) -> Tensor:
    return (dh.double() * torch.nn.functional.silu(gate.double()) * up.double()).abs().sum(-1)


def _group_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    """One of several equal groups, as in fold.py: of every result its tokens, or the slots of their scales."""
    *rows, group_ends = inputs
    length = at.stop - at.start
    slot = at.start // SPAN + at.start // length

    def cut(name: str, out: Tensor) -> Tensor:
        if name.endswith("span_sf"):
            return out[slot : slot + spans(length, 1)]
        return out[:, at] if name.endswith("_t") else out[at]

    return (*(x[at] for x in rows), group_ends[:1]), tuple(map(cut, swiglu_bwd_fold.outputs, outputs))


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    m, g = layer.tokens, layer.local_experts
    length = m // g // BLOCK * BLOCK
    ends = length * torch.arange(1, g + 1, dtype=torch.int32, device=device)
    prob = torch.rand(m, generator=torch.Generator(device).manual_seed(m), device=device)
    for f in layer.hiddens:
        gate, up, dh = values(3, m, f, device=device, octaves=0.5)
        shape = {"M": m, "F": f}
        # Peers are compiled at the first width only: the second would double the time of a run.
        compiled = f == layer.hiddens[0]
        for kind in ("row", "row_fold"):
            yield Case(f"swiglu_{kind}_fwd", shape, (gate, up, prob), one(f"swiglu_{kind}"), rows_part, m,
                       formula=f"swiglu_{kind}" if compiled else None)  # fmt: skip
        for kind in ("row", "both", "all"):
            yield Case(f"swiglu_{kind}_bwd", shape, (dh, gate, up, prob), one(f"swiglu_bwd_{kind}"), rows_part, m,
                       formula=f"swiglu_bwd_{kind}" if compiled else None, magnitude=_prob_gradient_terms)  # fmt: skip
        op = "swiglu_bwd_fold"
        yield Case("swiglu_fold_bwd", {**shape, "G": g}, (dh, gate, up, prob, ends), one(op), _group_part, g * length,
                   length, op if compiled else None, magnitude=_prob_gradient_terms,
                   scratch=4 * scratch_words(m, f))  # fmt: skip
