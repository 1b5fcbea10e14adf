"""The case of the family `routing`: sort the token replicas by expert, and compute the padded row map."""

from collections.abc import Iterator
from typing import Any

import torch
from mxep.core_kernels.cases import Layer
from mxep.core_kernels.routing.cases import TIMED
from torch import Tensor

from ..case import Call, Case


def skewed_logits(layer: Layer, device: str) -> tuple[Tensor, torch.Generator]:
    """(tokens, experts) fp32: some experts are chosen more often than others. And the generator, for further values."""
    rng = torch.Generator(device).manual_seed(layer.num_experts)
    logits = torch.randn(layer.tokens, layer.num_experts, generator=rng, device=device)
    logits += 0.5 * torch.randn(layer.num_experts, generator=rng, device=device)
    return logits, rng


def chosen_experts(layer: Layer, device: str) -> Tensor:
    """(tokens * top_k,) int32: top_k different experts per token."""
    return skewed_logits(layer, device)[0].topk(layer.top_k).indices.flatten().int()


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    ids, (timed,) = chosen_experts(layer, device), TIMED

    def both(call: Call, ids: Any) -> tuple[Any, ...]:
        """This rank's counts replace the counts that it would receive from an all-to-all."""
        order, inverse, counts = call("sort_by_expert", ids, num_experts=layer.num_experts)
        maps = call("row_map", counts, num_rows=len(ids), num_local_experts=layer.local_experts)
        return (order, inverse, counts, *maps)

    yield Case(timed, layer, (ids,), lambda case, outputs, at: (case.inputs, outputs), 1, formula=timed.name,
               by_bytes=False, compose=both)  # fmt: skip
