"""The case of the family `routing`: sort the token replicas by expert, and compute the padded row map."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..case import Call, Case, whole
from ..shapes import Layer

OPS = ("routing",)


def chosen_experts(layer: Layer, device: str) -> Tensor:
    """(tokens * top_k,) int32: top_k different experts per token, some experts chosen more often than others."""
    rng = torch.Generator(device).manual_seed(layer.num_experts)
    logits = torch.randn(layer.tokens, layer.num_experts, generator=rng, device=device)
    logits += 0.5 * torch.randn(layer.num_experts, generator=rng, device=device)
    return logits.topk(layer.top_k).indices.flatten().int()


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    ids = chosen_experts(layer, device)

    def program(call: Call, ids: Any) -> tuple[Any, ...]:
        """Both ops. This rank's counts replace the counts that it would receive from an all-to-all."""
        order, inverse, counts = call("sort_by_expert", ids, num_experts=layer.num_experts)
        maps = call("row_map", counts, num_rows=len(ids), num_local_experts=layer.local_experts)
        return (order, inverse, counts, *maps)

    shape = {"M": layer.tokens, "top_k": layer.top_k, "experts": layer.num_experts, "routing": "skewed"}
    yield Case("routing", shape, (ids,), program, whole, 1, formula="routing", by_bytes=False)
