"""Experts with packed weights as other libraries store them, multiplied without a copy of the weights.

    x (T, D) --dispatch--> groups (P, D) --gate_up--> (P, 2F) --gate--> h (P, F) --down--> (P, D) --combine--> y (T, D)

                                      gate_up       down          options
    Mixtral, Qwen-MoE, DeepSeek-V3    (E, 2F, D)    (E, D, F)     none
    Llama 4                           (E, D, 2F)    (E, F, D)     transposed
    GPT-OSS                           (E, D, 2F)    (E, F, D)     transposed, interleaved

A step has six products: one with gate_up and one with down, forward, and two gradients of each.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core_kernels.recipe import Recipe
from ..core_kernels.swiglu.activation import SwiGLU
from .grouped_mm import Names, checked_grouped_mm
from .packed_ffn import packed_ffn
from .permute import sort_by_expert
from .pipeline import TokenReplicas, combine, dispatch_over
from .swiglu import packed_swiglu
from .weighted_combine import sum_of_slots, weigh_slots

Rowwise = Callable[[Tensor], Tensor]
"""A differentiable function of rows, (P, N) bf16 -> (P, N')."""


class PackedExperts(NamedTuple):
    """The weights of E experts, bf16 or fp32, and what is computed between them.

    gate_up, down: as in the table above; without a gate, the first is (E, F, D) or, transposed, (E, D, F). Biases:
    (E, 2F) and (E, D), or None. gate: a `SwiGLU`, computed by the kernels, or a function (P, 2F) -> (P, F).
    interleaved: gate at even places of 2F; read for a SwiGLU alone. norm: of the experts' output rows, or None.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate: SwiGLU | Rowwise
    transposed: bool = False
    interleaved: bool = False
    norm: Rowwise | None = None


def packed_experts(
    op: str,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    packed: PackedExperts,
    recipe: Recipe,
    weigh_input: bool = False,
) -> Tensor:
    """y[t] = sum over k of weights[t, k] * expert[experts[t, k]](x[t]), in the name of `op`; differentiable.

    x: (T, D) bf16 or fp32. experts: (T, K) of an integer dtype. weights: (T, K) of any float dtype. Expert E is no
    expert: its rows are zero, as on a rank of expert parallelism that has only some of the experts. weigh_input:
    weights multiply x and not the experts' output. Returns (T, D) of x's dtype.
    """
    top_k, num_experts = experts.shape[1], packed.gate_up.shape[0]
    order, inverse, counts = sort_by_expert(experts, num_experts + 1)
    if weigh_input:
        tokens = TokenReplicas(weigh_slots(x, weights), order, inverse, 1)
    else:
        tokens = TokenReplicas(x.to(torch.bfloat16), order, inverse, top_k)
    groups, _, route = dispatch_over(tokens, counts, recipe, None)
    ends = route.group_ends[:num_experts].contiguous()  # rows past the last end give zeros
    out = _feed_forward(op, groups, ends, packed, recipe)
    if weigh_input:
        return sum_of_slots(combine(out, route), top_k, x.dtype)
    return combine(out, route, weights.float(), out_dtype=x.dtype)


def _feed_forward(op: str, groups: Tensor, ends: Tensor, packed: PackedExperts, recipe: Recipe) -> Tensor:
    def product(rows: Tensor, name: str, w: Tensor, bias: Tensor | None) -> Tensor:
        names = Names(op, "hidden_states", name, "group_ends", "pad")
        w = w.mT if packed.transposed else w
        return checked_grouped_mm(names, rows, w, ends, bias, torch.bfloat16, recipe, False)

    if isinstance(packed.gate, SwiGLU) and not packed.transposed and packed.gate_up_bias is None:
        out = packed_ffn(op, groups, packed.gate_up, packed.down, ends, recipe, packed.gate)
        return out if packed.norm is None else packed.norm(out)
    gate_up, gate = product(groups, "gate_up_proj", packed.gate_up, packed.gate_up_bias), packed.gate
    h = packed_swiglu(gate_up, gate, packed.interleaved) if isinstance(gate, SwiGLU) else gate(gate_up)
    out = product(h, "down_proj", packed.down, packed.down_bias)
    return out if packed.norm is None else packed.norm(out)
