"""A plain Mixture-of-Experts layer in bf16 over several ranks, in PyTorch, as a user writes it without this package.

x (T, D) --router, softmax, top-k--> p (T, k), experts (T, k) --stable sort--> rows by expert (T k, D)
         --counts to all ranks, splits to the host, all-to-all--> rows --gather--> groups of the local experts
         --grouped products w1, w3; silu(gate) up; w2--> --gather, all-to-all--> (T k, D) --weighted scatter-add--> y

The steps follow torchtitan's layer (torchtitan/models/common/moe.py) with its expert parallelism
(torchtitan/distributed/expert_parallel.py). torch's bf16 GEMM takes groups of any size, so nothing is padded.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from .expert_parallel import by_expert, permute
from .grouped_gemm import grouped_bf16
from .moe_layer import Weights, _swiglu

Experts = Callable[[Tensor, Weights, Tensor], Tensor]
"""(groups (R, D), weights, ends of the groups (local experts,) int32) -> (R, D)."""


def experts_bf16(groups: Tensor, weights: Weights, ends: Tensor) -> Tensor:
    """The feed-forward on torch's grouped product."""
    h = _swiglu()(grouped_bf16(groups, weights.w1, ends), grouped_bf16(groups, weights.w3, ends))
    return grouped_bf16(h, weights.w2, ends)


def torch_layer(x: Tensor, weights: Weights, top_k: int, group: dist.ProcessGroup, ffn: Experts) -> Tensor:
    """x (T, D) bf16, of this rank; router (E, D), w1, w3, w2 of this rank's experts -> y (T, D)."""
    ranks, num_experts = group.size(), len(weights.router)
    scores = F.linear(x, weights.router).float().softmax(-1)
    probs, experts = scores.topk(top_k, -1)
    probs = probs / probs.sum(-1, keepdim=True)
    order = torch.argsort(experts.flatten(), stable=True)
    sent = torch.histc(experts.flatten().float(), num_experts, 0, num_experts).long()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to, of = torch.stack([sent, received]).view(2, ranks, -1).sum(-1).tolist()  # the host waits here

    token = order // top_k
    rows = all_to_all_single_autograd(x.index_select(0, token), of, to, group)
    arrived = received.view(ranks, -1)
    there, back = by_expert(arrived, sum(of))
    ends = arrived.sum(0).cumsum(0).to(torch.int32)
    out = permute(ffn(permute(rows, there, back), weights, ends), back, there)
    out = all_to_all_single_autograd(out, to, of, group).float() * probs.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token, out.to(x.dtype))
