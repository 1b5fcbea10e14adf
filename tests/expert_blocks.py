"""The expert blocks of five models in fp64, as transformers writes them: a loop over experts, packed weights.

    x (T, D) --router--> experts, weights (T, K)          a model's `route`
    rows of an expert --gate_up--> gate, up --> h --down--> out, times the row's weight; Llama 4 weighs the rows of x

Sources: transformers 5, modeling_mixtral.py, modeling_qwen3_moe.py, modeling_deepseek_v3.py, modeling_llama4.py,
modeling_gpt_oss.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

T, D, HIDDEN, E = 64, 64, 96, 8


def _shares(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


def _softmax_then_choose(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    scores, experts = logits.softmax(-1).topk(top_k, -1)
    return experts, _shares(scores)


def _choose_in_groups(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3: a bias for the choice alone, two of four groups by their best two, weights times 2.5."""
    scores = logits.sigmoid()
    biased = scores + torch.linspace(-0.1, 0.1, E, dtype=scores.dtype)
    best = biased.view(len(scores), 4, -1).topk(2, -1)[0].sum(-1).topk(2, -1)[1]
    allowed = F.one_hot(best, 4).sum(1).repeat_interleave(E // 4, -1).bool()
    experts = biased.masked_fill(~allowed, 0).topk(top_k, -1)[1]
    return experts, 2.5 * _shares(scores.gather(1, experts))


def _choose_then_sigmoid(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    chosen, experts = logits.topk(top_k, -1)
    return experts, chosen.sigmoid()


def _choose_then_softmax(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    chosen, experts = (logits + torch.linspace(-1, 1, E, dtype=logits.dtype)).topk(top_k, -1)
    return experts, chosen.softmax(-1)


def _silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


@dataclass(frozen=True)
class Block:
    """layout: options of `unpack_expert_weights`. numbers: of SwiGLU. weigh_input: weights multiply the rows of x."""

    route: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    top_k: int
    layout: dict[str, bool] = field(default_factory=dict)
    activation: Callable[[Tensor, Tensor], Tensor] = _silu
    numbers: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    weigh_input: bool = False
    shared: bool = False

    def parameters(self) -> dict[str, Tensor]:
        """The packed weights in fp32; "shared_gate_up" and "shared_down" of a shared expert."""
        gen = torch.Generator().manual_seed(self.top_k)

        def draw(name: str, *shape: int) -> Tensor:
            if name.endswith("bias"):
                return torch.randn(shape, generator=gen)
            w = torch.randn(shape, generator=gen) * shape[-1] ** -0.5
            return w.transpose(1, 2).contiguous() if self.layout.get("transposed") else w

        shapes: dict[str, tuple[int, ...]] = {"gate_up": (E, 2 * HIDDEN, D), "down": (E, D, HIDDEN)}
        if self.bias:
            shapes |= {"gate_up_bias": (E, 2 * HIDDEN), "down_bias": (E, D)}
        if self.shared:
            shapes |= {"shared_gate_up": (1, 2 * HIDDEN, D), "shared_down": (1, D, HIDDEN)}
        return {name: draw(name, *shape) for name, shape in shapes.items()}

    def inputs(self) -> dict[str, Tensor]:
        """x (T, D) of bf16 values, dy (T, D), experts (T, K), weights (T, K) fp32."""
        gen = torch.Generator().manual_seed(100)
        x, dy = (torch.randn(T, D, generator=gen).bfloat16().float() for _ in range(2))
        experts, weights = self.route(x.double() @ torch.randn(D, E, generator=gen).double() / 8, self.top_k)
        return {"x": x, "dy": dy, "experts": experts, "weights": weights.float()}

    def expert(self, x: Tensor, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor] | None) -> Tensor:
        transposed = self.layout.get("transposed", False)
        both = x @ (gate_up if transposed else gate_up.T) + (biases[0] if biases else 0)
        gate, up = (both[:, ::2], both[:, 1::2]) if self.layout.get("interleaved") else both.chunk(2, dim=-1)
        return self.activation(gate, up) @ (down if transposed else down.T) + (biases[1] if biases else 0)

    def reference(self) -> dict[str, Tensor]:
        """ "y" and the gradients of "x", "weights" and the packed parameters, in fp64."""
        inputs = self.inputs()
        leaves = {name: inputs[name].double() for name in ("x", "weights")}
        leaves |= {name: w.double() for name, w in self.parameters().items()}
        leaves = {name: t.requires_grad_() for name, t in leaves.items()}
        x, weights, y = leaves["x"], leaves["weights"], torch.zeros(T, D, dtype=torch.float64)
        for e in range(E):
            token, slot = torch.where(inputs["experts"] == e)
            weight = weights[token, slot, None]
            biases = (leaves["gate_up_bias"][e], leaves["down_bias"][e]) if self.bias else None
            rows = x[token] * weight if self.weigh_input else x[token]
            out = self.expert(rows, leaves["gate_up"][e], leaves["down"][e], biases)
            y = y.index_add(0, token, out if self.weigh_input else out * weight)
        if self.shared:
            y = y + self.expert(x, leaves["shared_gate_up"][0], leaves["shared_down"][0], None)
        grads = torch.autograd.grad(y, list(leaves.values()), inputs["dy"].double())
        return {"y": y.detach()} | dict(zip(leaves, grads, strict=True))


BLOCKS = {
    "mixtral": Block(_softmax_then_choose, 2),
    "qwen3_moe": Block(_softmax_then_choose, 4),
    "deepseek_v3": Block(_choose_in_groups, 3, shared=True),
    "llama4": Block(_choose_then_sigmoid, 1, {"transposed": True}, weigh_input=True, shared=True),
    "gpt_oss": Block(
        _choose_then_softmax, 4, {"transposed": True, "interleaved": True}, _gpt_oss,
        {"alpha": 1.702, "limit": 7.0, "offset": 1.0}, bias=True,
    ),
}  # fmt: skip
