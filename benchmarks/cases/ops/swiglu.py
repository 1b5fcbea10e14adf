"""Cases of the family `swiglu`: forward along rows, or folded; backward along rows, both dims, or these and h, also
folded."""

from collections.abc import Iterator

import torch
from mxep.core_kernels.cases import Layer
from mxep.core_kernels.swiglu.cases import TIMED
from torch import Tensor

from ..case import Call, Case, equal_groups, group_part, rows_part, values


def _prob_gradient_terms(dh: Tensor, gate: Tensor, up: Tensor, *_: Tensor) -> Tensor:
    return (dh.double() * torch.nn.functional.silu(gate.double()) * up.double()).abs().sum(-1)


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    m, (length, ends) = layer.tokens, equal_groups(layer, device)
    prob = torch.rand(m, generator=torch.Generator(device).manual_seed(m), device=device)
    for f in layer.hiddens:
        gate, up, dh = values(3, m, f, device=device, octaves=0.5)
        for timed in TIMED:
            # Peers are compiled at the first width only: the second would double the time of a run.
            formula = timed.ops[0] if f == layer.hiddens[0] else None
            of, forward = layer._replace(hiddens=(f,)), timed.name.endswith("_fwd")
            inputs = (gate, up, prob) if forward else (dh, gate, up, prob)
            magnitude = None if forward else _prob_gradient_terms
            if "G" in timed.sizes:
                yield Case(timed, of, (*inputs, ends), group_part, len(ends) * length, length, formula,
                           magnitude=magnitude)  # fmt: skip
            else:
                yield Case(timed, of, inputs, rows_part, formula=formula, magnitude=magnitude)
