"""Cases of the family `router`: the choice of experts from the logits, and the gradient of the logits."""

from collections.abc import Iterator

import torch
from mxep.core_kernels.router.plan import CHUNK

from ..case import Call, Case, Tensors, one
from ..shapes import Layer

OPS = ("route", "route_bwd")


def _forward_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    logits, bias = inputs
    ids, weights, share_sums = outputs
    return (logits[at], bias), (ids[at], weights[at], share_sums[at.start // CHUNK : -(-at.stop // CHUNK)])


def _backward_part(inputs: Tensors, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    dweights, dshares, logits, ids = inputs
    return (dweights[at], dshares, logits[at], ids[at]), (outputs[0][at],)


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    """The softmax over all experts, renormalised; some experts are chosen more often than others."""
    rng = torch.Generator(device).manual_seed(layer.num_experts)
    logits = torch.randn(layer.tokens, layer.num_experts, generator=rng, device=device)
    logits += 0.5 * torch.randn(layer.num_experts, generator=rng, device=device)
    none = torch.empty(0, device=device)
    ids, _, _ = call("route", logits, none, top_k=layer.top_k)
    shape = {"M": layer.tokens, "top_k": layer.top_k, "experts": layer.num_experts}
    yield Case("route", {**shape, "direction": "fwd"}, (logits, none), one("route", top_k=layer.top_k),
               _forward_part, layer.tokens, formula="route")  # fmt: skip
    dweights = torch.randn(ids.shape, generator=rng, device=device)
    dshares = torch.randn(layer.num_experts, generator=rng, device=device)
    yield Case("route_bwd", {**shape, "direction": "bwd"}, (dweights, dshares, logits, ids), one("route_bwd"),
               _backward_part, layer.tokens, formula="route_bwd")  # fmt: skip
