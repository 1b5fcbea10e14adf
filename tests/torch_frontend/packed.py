"""The feed-forward of packed weights, and of the same weights apart; on any device."""

from typing import Any

import torch
from mxep.torch_frontend import RECIPES, MXTensor, Recipe, SwiGLU, grouped_swiglu_ffn, unpack_expert_weights
from mxep.torch_frontend.packed_ffn import packed_ffn
from torch import Tensor

E, D, F, ROWS = 3, 64, 96, 128
ENDS = torch.tensor([32, 32, 96], dtype=torch.int32)  # the second group is empty; rows 96.. belong to nobody
ALL = [*RECIPES.values(), Recipe("folded", compute="fold", wgrad_with_hp=False), Recipe("folded_hp", compute="fold")]
NEEDS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5).to(dtype)


def both(
    recipe: Recipe, dtype: torch.dtype, mx: bool, needs: tuple[bool, ...], device: str = "cpu", times: int = 1
) -> tuple[list[Any], list[Any]]:
    """(y, the gradients of x, gate_up and down) of packed weights, and of the same weights apart. mx: of x and dy.
    times: the factor of all sizes."""
    need_x, need_gate_up, need_down = needs
    rows_, d, f, ends = ROWS * times, D * times, F * times, (ENDS * times).to(device)
    results = []
    for packed in (True, False):
        x = randn(rows_, d, seed=0, dtype=dtype).to(device).requires_grad_(need_x)
        gate_up = randn(E, 2 * f, d, seed=1, dtype=dtype).to(device)
        down = randn(E, d, f, seed=2, dtype=dtype).to(device)
        dy = randn(rows_, d, seed=3, dtype=torch.bfloat16).to(device)
        rows, dout = (MXTensor.quantize(t) if mx else t for t in (x, dy))
        activation = SwiGLU(limit=0.5)
        if packed:
            gate_up.requires_grad_(need_gate_up)
            down.requires_grad_(need_down)
            y = packed_ffn("test", rows, gate_up, down, ends, recipe, activation)
            y.backward(dout)
            grads = gate_up.grad, down.grad
        else:
            w = unpack_expert_weights(gate_up, down)
            for name, part in w.items():
                part.requires_grad_(need_down if name == "w2" else need_gate_up)
            options: Any = {"activation": activation, "recipe": recipe, "pad_token_groups": False}
            y = grouped_swiglu_ffn(rows, **w, group_ends=ends, **options)
            y.backward(dout)
            gate_up_grad = torch.cat([w["w1"].grad, w["w3"].grad], 1) if need_gate_up else None  # type: ignore[list-item]
            grads = gate_up_grad, w["w2"].grad
        results.append([y.detach(), x.grad, *grads])
    return results[0], results[1]
