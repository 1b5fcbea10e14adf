"""Experts with packed weights as other libraries store them, multiplied without a copy of the weights.

    x (T, D) --dispatch--> groups (P, D) --gate_up--> (P, 2F) --gate--> h (P, F) --down--> (P, D) --combine--> y (T, D)

                                      gate_up       down          options
    Mixtral, Qwen-MoE, DeepSeek-V3    (E, 2F, D)    (E, D, F)     none
    Llama 4                           (E, D, 2F)    (E, F, D)     transposed
    GPT-OSS                           (E, D, 2F)    (E, F, D)     transposed, interleaved

The weights of the routing multiply h inside of `packed_ffn`, as prob_in="swiglu" of `MoE` does: the combine then saves
no rows, T k D 2 bytes, and its gradient copies quantized tokens. They multiply the outputs in the combine where h is
not all of an output, with a bias of down, which a weight per row would cost a pass in fp32, or with a norm of the
outputs; and with a gate of the module's own.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...core_kernels.policy.recipe import Recipe
from ...core_kernels.swiglu.activation import SwiGLU
from ..exchange.all_to_all import TokenReplicas, sent_rows
from ..exchange.combine import combine
from ..exchange.counts import Request
from ..exchange.dispatch import dispatch_over, dispatch_probs
from ..exchange.route import Route
from ..ops.checks import check_autocast
from ..products.grouped_mm import Names, checked_grouped_mm
from ..routing.permute import sort_by_expert
from ..routing.weighted_combine import sum_of_slots, weigh_slots
from .packed_ffn import packed_ffn

Rowwise = Callable[[Tensor], Tensor]
"""A differentiable function of rows, (P, N) bf16 -> (P, N')."""


class PackedExperts(NamedTuple):
    """The weights of E experts, bf16 or fp32, and what is computed between them.

    Attributes:
        gate_up: (E, 2F, D) or, transposed, (E, D, 2F), as in the table above. Without a gate (E, F, D) or, transposed,
            (E, D, F).
        down: (E, D, F) or, transposed, (E, F, D).
        gate: a `SwiGLU`, computed by the kernels, or a function (P, 2F) -> (P, F).
        interleaved: gate at even places of 2F; read for a SwiGLU alone.
        norm: of the experts' output rows, or None.
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

    Args:
        op: the function that an error names.
        x: (T, D) bf16 or fp32.
        experts: (T, K) of an integer dtype.
        weights: (T, K) of any float dtype. Expert E is no expert: its rows are zero, as on a rank of expert parallelism
            that has only some of the experts.
        packed: the weights.
        recipe: of the products.
        weigh_input: weights multiply x and not the experts' output.

    Returns:
        (T, D) of x's dtype.
    """
    check_autocast(op, x)
    top_k, num_experts = experts.shape[1], packed.gate_up.shape[0]
    order, inverse, counts = sort_by_expert(experts, num_experts + 1)
    if weigh_input:
        tokens = TokenReplicas(weigh_slots(x, weights), order, inverse, 1)
    else:
        tokens = TokenReplicas(x.to(torch.bfloat16), order, inverse, top_k)
    groups, _, route = dispatch_over(Request(op, tokens, counts, recipe))
    if weigh_input:
        return sum_of_slots(combine(_outputs(op, groups, route, packed, recipe, None), route), top_k, x.dtype)
    weights = weights.float()
    if isinstance(packed.gate, SwiGLU) and packed.down_bias is None and packed.norm is None:
        out = _outputs(op, groups, route, packed, recipe, dispatch_probs(weights, route))
        return combine(out, route, out_dtype=x.dtype)
    return combine(_outputs(op, groups, route, packed, recipe, None), route, weights, out_dtype=x.dtype)


def _outputs(
    op: str, groups: Tensor, route: Route, packed: PackedExperts, recipe: Recipe, prob: Tensor | None
) -> Tensor:
    """The experts' outputs (P, D) bf16, weighted if there is a weight per row."""
    num_experts, gate = packed.gate_up.shape[0], packed.gate
    ends = route.group_ends[:num_experts].contiguous()  # rows past the last end give zeros
    if isinstance(gate, SwiGLU):
        out = packed_ffn(
            op, groups, packed.gate_up, packed.down, ends, recipe, gate, prob=prob, gate_up_bias=packed.gate_up_bias,
            down_bias=packed.down_bias, transposed=packed.transposed, interleaved=packed.interleaved,
        )  # fmt: skip
    else:
        names = Names(op, "hidden_states", "gate_up_proj", "group_ends", "pad")
        first, last = (w.mT if packed.transposed else w for w in (packed.gate_up, packed.down))
        multiply = partial(checked_grouped_mm, out_dtype=torch.bfloat16, recipe=recipe, pad=False)
        gate_up = multiply(names, groups, first, ends, packed.gate_up_bias)
        out = multiply(names._replace(w="down_proj"), gate(gate_up), last, ends, packed.down_bias)
    if packed.norm is None:
        return out
    # The combine's gradient may be an MXTensor, which a norm of the model cannot take: it gets the values.
    return sent_rows(packed.norm(out), False, 0) if recipe.sends_mx("combine_grad") else packed.norm(out)
