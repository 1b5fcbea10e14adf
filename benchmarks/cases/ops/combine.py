"""Cases of the family `combine`: the weighted sum of each token's top_k rows, and its gradients."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..case import Call, Case, Tensors, gathered, one, values
from ..shapes import Layer
from .routing import chosen_experts

OPS = ("combine",)


def _forward_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    rows, slots, probs = inputs
    return (*gathered(rows, slots[at]), probs[at]), (outputs[0][at],)


def _backward_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    dy, rows, slots, _, probs = inputs
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
    shape = {"M": layer.tokens, "K": layer.dim, "top_k": layer.top_k}
    yield Case("combine", {**shape, "direction": "fwd"}, (rows, slots, probs), one("combine"), _forward_part,
               layer.tokens, formula="combine")  # fmt: skip
    dy = values(layer.tokens, layer.dim, device=device, operand=1)
    yield Case("combine", {**shape, "direction": "bwd"}, (dy, rows, slots, order, probs), one("combine_bwd"),
               _backward_part, layer.tokens, formula="combine_bwd", magnitude=_dot_terms)  # fmt: skip
    yield Case("combine", {**shape, "direction": "bwd", "to": "row"}, (dy, rows, slots, order, probs),
               one("combine_bwd_row"), _backward_part, layer.tokens, formula="combine_bwd_row",
               magnitude=_dot_terms)  # fmt: skip
