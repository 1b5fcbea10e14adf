"""A weight, a product with its gradients, and ways to write to the weight."""

import torch
from mxep.torch_frontend.integrations.torchao import mxfp8_grouped_mm
from mxep.torch_frontend.products.weights import QuantizedWeights
from torch import Tensor, nn

ENDS = torch.tensor([32, 64], dtype=torch.int32)
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def parameter(dtype: torch.dtype = torch.bfloat16, experts: int = 2) -> nn.Parameter:
    w = nn.Parameter(torch.empty(experts, 32, 64, dtype=dtype))
    return nn.init.normal_(w, generator=torch.Generator().manual_seed(0))


def step(w: Tensor | QuantizedWeights, **options: object) -> list[Tensor]:
    """Output, input gradient and weight gradient."""
    x = X.clone().requires_grad_()
    values = w.values if isinstance(w, QuantizedWeights) else w
    out = mxfp8_grouped_mm(x, w if isinstance(w, QuantizedWeights) else w.mT, ENDS, **options)
    if not out.requires_grad:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, [x, values], torch.ones_like(out), allow_unused=True)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def clone(w: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(w.detach().clone())


def written_in_place(w: nn.Parameter) -> None:
    with torch.no_grad():
        w.mul_(3)


def through_data(w: nn.Parameter) -> None:
    w.data.mul_(3)


def other_memory(w: nn.Parameter) -> None:
    w.data = w.data * 3
