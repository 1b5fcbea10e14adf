"""Cases of the family `swiglu`: forward along rows, or folded; backward along rows, both dims, or these and h."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .case import Call, Case, one, rows_part, values
from .shapes import Layer

OPS = ("swiglu_row_fwd", "swiglu_row_fold_fwd", "swiglu_row_bwd", "swiglu_both_bwd", "swiglu_all_bwd")


def _prob_gradient_terms(dh: Tensor, gate: Tensor, up: Tensor, prob: Tensor) -> Tensor:
    return (dh.double() * torch.nn.functional.silu(gate.double()) * up.double()).abs().sum(-1)


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    m = layer.tokens
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
