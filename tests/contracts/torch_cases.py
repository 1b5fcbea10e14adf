"""Contracts of one process in PyTorch, on a CPU and on a GPU; test_torch.py and tests/gpu/layer/test_contracts.py."""

import torch
from mxep.torch_frontend import grouped_swiglu_ffn, quantize_weights

from .table import Row
from .torch_layers import DIM, HIDDEN, TOKENS, layer_of, recipe_of, same, tokens

ROLLOUT = (1, 2, 3, 7, 16, 31, 32, 33, 64, 100, 255, 256)
"""Tokens of a call."""


def batch_invariance(row: Row, device: str) -> None:
    """y of a token alone among others: fewer, in another order, and with other values in all other rows."""
    moe, x = layer_of(row, device), tokens(row, device)
    with torch.no_grad():
        want = moe(x)[0]
        for number in (2, 3, 17, 33):
            same({"y": moe(x[:number])[0]}, {"y": want[:number]}, number)
        same({"y": moe(x.flip(0))[0].flip(0)}, {"y": want}, "order")
        others = torch.cat([x[:5], tokens(row, device, seed=9, number=TOKENS)])
        same({"y": moe(others)[0][:5]}, {"y": want[:5]}, "other tokens")


def rollout(recipe: str, device: str) -> None:
    """`grouped_swiglu_ffn` of quantized weights under `no_grad` at 1 to 256 tokens has the bits of training."""
    generator, of = torch.Generator().manual_seed(0), recipe_of(recipe)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device)

    w1, w3, w2 = (normal(1, *shape).requires_grad_() for shape in ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN)))
    x = (8 * normal(256, DIM)).bfloat16()

    def ends(number: int) -> torch.Tensor:
        return torch.tensor([number], dtype=torch.int32, device=device)

    trained = grouped_swiglu_ffn(x.requires_grad_(), w1, w3, w2, ends(256), recipe=of)
    assert trained.requires_grad
    q1, q3, q2 = (quantize_weights(w, of) for w in (w1, w3, w2))
    with torch.no_grad():
        for number in ROLLOUT:
            got = grouped_swiglu_ffn(x[:number], q1, q3, q2, ends(number), recipe=of)
            same({"y": got}, {"y": trained.detach()[:number]}, (recipe, number))
