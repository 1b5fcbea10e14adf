"""Cases of the family `combine`: the weighted sum of each token's top_k rows, and its gradients."""

from collections.abc import Iterator

import torch
from mxep.core_kernels.cases import Layer
from mxep.core_kernels.combine.cases import TIMED
from torch import Tensor

from ..case import Call, Case, Tensors, gathered, values
from .routing import chosen_experts


def _forward_part(case: Case, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    rows, slots, probs = case.inputs
    return (*gathered(rows, slots[at]), probs[at]), (outputs[0][at],)


def _backward_part(case: Case, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    dy, rows, slots, _, probs = case.inputs
    x, local = gathered(rows, slots[at])
    *drows, dprobs = outputs
    return (dy[at], x, local, local.flatten(), probs[at]), (*(gathered(d, slots[at])[0] for d in drows), dprobs[at])


def _dot_terms(dy: Tensor, rows: Tensor, slots: Tensor, order: Tensor, probs: Tensor) -> Tensor:
    return (dy[:, None].double() * rows[slots.long()].double()).abs().sum(-1)


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    """The rows are sorted by expert, as the experts return them."""
    order, slots, _ = call("sort_by_expert", chosen_experts(layer, device), num_experts=layer.num_experts)
    slots = slots.view(layer.tokens, layer.top_k)
    rows = values(len(order), layer.dim, device=device)
    rng = torch.Generator(device).manual_seed(1)
    probs = torch.randn(slots.shape, generator=rng, device=device).softmax(-1)
    forward, *backward = TIMED
    yield Case(forward, layer, (rows, slots, probs), _forward_part, layer.tokens, formula="combine")
    inputs = values(layer.tokens, layer.dim, device=device, operand=1), rows, slots, order, probs
    for timed in backward:
        yield Case(timed, layer, inputs, _backward_part, formula=timed.ops[0], magnitude=_dot_terms)
