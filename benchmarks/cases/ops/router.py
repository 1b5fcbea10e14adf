"""Cases of the family `router`: the choice of experts from the logits, and the gradient of the logits."""

from collections.abc import Iterator

import torch
from mxep.core_kernels.cases import Layer
from mxep.core_kernels.router.cases import TIMED
from mxep.core_kernels.router.plan import CHUNK

from ..case import Call, Case, Tensors
from .routing import skewed_logits


def _forward_part(case: Case, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    logits, bias = case.inputs
    ids, weights, share_sums = outputs
    return (logits[at], bias), (ids[at], weights[at], share_sums[at.start // CHUNK : -(-at.stop // CHUNK)])


def _backward_part(case: Case, outputs: Tensors, at: slice) -> tuple[Tensors, Tensors]:
    dweights, dshares, logits, ids = case.inputs
    return (dweights[at], dshares, logits[at], ids[at]), (outputs[0][at],)


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    """The softmax over all experts, renormalised."""
    forward, backward = TIMED
    logits, rng = skewed_logits(layer, device)
    none = torch.empty(0, device=device)
    ids, _, _ = call("route", logits, none, top_k=layer.top_k)
    yield Case(forward, layer, (logits, none), _forward_part, formula=forward.name)
    dweights = torch.randn(ids.shape, generator=rng, device=device)
    dshares = torch.randn(layer.num_experts, generator=rng, device=device)
    yield Case(backward, layer, (dweights, dshares, logits, ids), _backward_part, formula=backward.name)
