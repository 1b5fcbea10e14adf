"""The feed-forward of packed weights, and what it is compared with; on any device."""

from typing import Any

import torch
from mxep.torch_frontend import RECIPES, MXTensor, Recipe, SwiGLU, grouped_mm, grouped_swiglu_ffn, swiglu
from mxep.torch_frontend.integrations.layouts import halves, unpack_expert_weights
from mxep.torch_frontend.integrations.packed_ffn import packed_ffn
from torch import Tensor

E, D, F, ROWS = 3, 64, 96, 128
ENDS = torch.tensor([32, 32, 96], dtype=torch.int32)  # the second group is empty; rows 96.. belong to nobody
ALL = [*RECIPES.values(), Recipe("folded", compute="fold", wgrad_with_hp=False), Recipe("folded_hp", compute="fold")]
NEEDS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
JOINED = {  # transposed, interleaved, biases
    "llama4": (True, False, False),
    "gpt_oss": (True, True, True),
    "biases alone": (False, False, True),
    "columns alone": (False, True, False),
}
"""Layouts whose gate and up are one product of 2F columns."""


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5).to(dtype)


def both(
    recipe: Recipe, dtype: torch.dtype, mx: bool, needs: tuple[bool, ...], device: str = "cpu", times: int = 1,
    weighted: bool = False,
) -> tuple[list[Any], list[Any]]:  # fmt: skip
    """(y, the gradients of x, gate_up, down and prob) of packed weights, and of the same weights apart. mx: of x and
    dy. times: the factor of all sizes. weighted: with prob."""
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
        prob = probabilities(rows_).to(device).requires_grad_() if weighted else None
        if packed:
            gate_up.requires_grad_(need_gate_up)
            down.requires_grad_(need_down)
            y = packed_ffn("test", rows, gate_up, down, ends, recipe, activation, prob=prob)
            y.backward(dout)
            grads = gate_up.grad, down.grad
        else:
            w = unpack_expert_weights(gate_up, down)
            for name, part in w.items():
                part.requires_grad_(need_down if name == "w2" else need_gate_up)
            options: Any = {"activation": activation, "recipe": recipe, "pad_token_groups": False, "prob": prob}
            y = grouped_swiglu_ffn(rows, **w, group_ends=ends, **options)
            y.backward(dout)
            gate_up_grad = torch.cat([w["w1"].grad, w["w3"].grad], 1) if need_gate_up else None  # type: ignore[list-item]
            grads = gate_up_grad, w["w2"].grad
        results.append([y.detach(), x.grad, *grads, None if prob is None else prob.grad])
    return results[0], results[1]


def probabilities(rows: int) -> Tensor:
    return torch.rand(rows, generator=torch.Generator().manual_seed(4))


def fused_and_composed(
    layout: tuple[bool, bool, bool], recipe: Recipe, dtype: torch.dtype, mx: bool, needs: tuple[bool, ...],
    device: str = "cpu", times: int = 1,
) -> tuple[dict[str, Any], dict[str, Any], Tensor | None]:  # fmt: skip
    """y and all gradients by name, of `packed_ffn` and of grouped_mm, swiglu and grouped_mm; None where nothing needs
    one; and the bound of the gradients of prob, fp32 sums of equal terms in any order. Biases need gradients as gate_up
    and down do; without biases rows have weights."""
    (transposed, interleaved, biased), (need_x, need_gate_up, need_down) = layout, needs
    rows_, d, f, ends = ROWS * times, D * times, F * times, (ENDS * times).to(device)
    activation, results, bound = SwiGLU(alpha=1.702, limit=0.5, offset=1.0), [], None
    for fused in (True, False):
        x = randn(rows_, d, seed=0, dtype=dtype).to(device).requires_grad_(need_x)
        gate_up, down = randn(E, 2 * f, d, seed=1, dtype=dtype), randn(E, d, f, seed=2, dtype=dtype)
        gate_up, down = ((w.mT.contiguous() if transposed else w).to(device) for w in (gate_up, down))
        dy = randn(rows_, d, seed=3, dtype=torch.bfloat16).to(device)
        b1, b2 = (randn(E, n, seed=5, dtype=dtype).to(device) if biased else None for n in (2 * f, d))
        prob = None if biased else probabilities(rows_).to(device).requires_grad_(need_x)
        leaves = {"x": x, "gate_up": gate_up, "down": down, "prob": prob, "gate_up_bias": b1, "down_bias": b2}
        for name in leaves:
            if name.startswith(("gate_up", "down")) and leaves[name] is not None:
                leaves[name].requires_grad_(need_gate_up if name.startswith("gate_up") else need_down)  # type: ignore[union-attr]
        rows, dout = (MXTensor.quantize(t) if mx else t for t in (x, dy))
        if fused:
            options: Any = {"transposed": transposed, "interleaved": interleaved, "prob": prob}
            biases: Any = {"gate_up_bias": b1, "down_bias": b2}
            y = packed_ffn("test", rows, gate_up, down, ends, recipe, activation, **biases, **options)
        else:
            first, last = (w.mT if transposed else w for w in (gate_up, down))
            options = {"recipe": recipe, "pad_token_groups": False}
            both_halves = halves(grouped_mm(rows, first, ends, bias=b1, **options), interleaved)
            h = swiglu(*both_halves, prob, activation)
            y = grouped_mm(h, last, ends, bias=b2, **options)
        if not fused and prob is not None and prob.requires_grad:
            h.retain_grad()
        y.backward(dout)
        if not fused and prob is not None and prob.requires_grad:
            terms = h.grad.double() * h.detach().double() / prob.detach()[:, None]  # type: ignore[union-attr]
            bound = f * 2.0**-23 * terms.abs().sum(1)
        results.append({"y": y.detach()} | {name: t.grad for name, t in leaves.items() if t is not None})
    return results[0], results[1], bound
