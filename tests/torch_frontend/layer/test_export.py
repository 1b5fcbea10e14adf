"""torch.export of a model with a layer: saved and loaded, for any number of tokens from 9 on."""

import io

import torch
from mxep.torch_frontend import MoE, RouterConfig
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(32, 64, 4, RouterConfig(2), recipe="mxfp8")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


def test_a_model_is_exported() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(48, 32)
    tokens = torch.export.Dim("tokens", min=9)
    with torch.no_grad():
        program = torch.export.export(block, (x,), dynamic_shapes={"x": {0: tokens}})
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for size in (9, 48, 100):
            x = torch.randn(size, 32)
            assert torch.equal(loaded(x), block(x))
