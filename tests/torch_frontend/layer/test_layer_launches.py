"""Torch's kernels in a step of the layer on a GPU, without the ops of this package: an eager step of a small layer
takes as long as the host takes to start the kernels."""

from collections import Counter
from typing import Any

import pytest
import torch
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import MoE, RouterConfig
from mxep.torch_frontend.ops import checks
from mxep.torch_frontend.routing import router
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WITHOUT_KERNELS = {"view", "_unsafe_view", "detach", "t", "slice", "empty", "new_empty", "empty_like", "empty_strided"}
FORWARD = Counter(
    sum=2,  # of the shares, of the auxiliary loss
    div=2,  # of the auxiliary loss
    mul=2,
    new_zeros=1,  # overflow
)
BACKWARD = Counter(
    add=1,  # both terms of the router's weight
)


class Kernels(TorchDispatchMode):
    """Names of torch's operations that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if func.namespace != "mxep" and name not in WITHOUT_KERNELS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def product(a: Tensor, b: Tensor) -> Tensor:
    """In place of the router's product, which is one kernel on a GPU and three operations on a CPU."""
    return torch.empty(a.shape[0], b.shape[1])


@pytest.mark.parametrize("dims", [2, 3])
def test_kernels_beside_the_ops(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "checks_values", lambda device: False)  # as on a GPU
    monkeypatch.setattr(router, "_product", product)
    moe = MoE(
        64,
        64,
        4,
        RouterConfig(2, force_balance=True),
        recipe=Recipe.parse("mxfp8", compute="fold"),
        dtype=torch.bfloat16,
    )
    x = torch.ones((6, 64) if dims == 2 else (2, 3, 64), dtype=torch.bfloat16, requires_grad=True)
    with Kernels() as forward:
        y, _ = moe(x)
    dy = torch.ones_like(y.detach())
    with Kernels() as backward:
        torch.autograd.grad(y, (x, *moe.parameters()), dy)
    assert forward.found == FORWARD
    assert backward.found == BACKWARD
