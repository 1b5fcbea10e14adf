"""The whole Mixture-of-Experts layer with its experts on several ranks: ours, over each transport, and a plain one.

x (T, D) of each rank --router, dispatch, experts, combine--> y; backward: the gradients of x, of the router, summed
over the ranks, and of this rank's experts

The router's weight is the identity on the first E values of x, and these hold E different values in an order that the
routing chooses: every candidate, with a router in bf16 or in fp32, chooses the same experts.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.deduplicate import Deduplicate
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import ExpertParallel, MoE, RouterConfig, grouped_swiglu_ffn
from mxep.torch_frontend.overlap.expert_parallel import choose_exchange
from mxep.torch_frontend.overlap.peer_memory import PeerMemory
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...peers.ep_layer import Experts, experts_bf16, torch_layer
from ...peers.moe_layer import Weights
from .. import shapes
from ..case import Tensors, values
from ..chosen_experts import logits, places
from ..moe_layer import OUTPUTS
from ..shapes import MoELayer
from .ep_work import BF16_WIRE, IN_TURN, ONCE, PEER, SUMMED, Work

BF16 = torch.bfloat16
H200 = (*shapes.H200.moe_layers[:2], MoELayer(16384, 5120, 1536, 48, 6), MoELayer(8192, 2048, 768, 128, 8))
TINY = (MoELayer(96, 64, 32, 8, 2),)
# y and every gradient against the plain layer: at least 22.1 dB measured on a CPU, over three shapes, all routings,
# both recipes, "exact" and "fold"; less 1.1.
MIN_SQNR_DB = 21.0


def tokens_of(shape: MoELayer, routing: str, rank: int, device: torch.device) -> Tensor:
    """(T, D) bf16: normal values, and in front of each token its logits."""
    t, d, _, e, k = shape
    rng = torch.Generator(device).manual_seed(rank)
    x = torch.randn(t, d, generator=rng, device=device, dtype=BF16)
    x[:, :e] = torch.from_numpy(logits(routing, t, e, k, rank)).to(device, BF16)
    return x


def our_layer(shape: MoELayer, recipe: Recipe, group: dist.ProcessGroup, device: torch.device) -> MoE:
    """The layer, its experts over the ranks of the group; the weights' deviation is 1 / sqrt(fan in)."""
    _, d, f, e, k = shape
    moe = MoE(d, f, e, RouterConfig(k), recipe=recipe, dtype=BF16, device=device)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(e, d))
        for i, w in enumerate((moe.experts.w1, moe.experts.w3, moe.experts.w2), 1):
            w.copy_(values(*w.shape, device=device.type, octaves=0.5, operand=i).mul_(w.shape[-1] ** -0.5))
    mesh = DeviceMesh.from_group(group, device.type)
    parallelize_module(moe, mesh, ExpertParallel(gradients="sum"))
    return moe


def work(
    shape: MoELayer, routing: str, recipe: Recipe, transports: Mapping[str, PeerMemory], device: torch.device
) -> Work:
    """The layer of this shape, `tokens` on each of the ranks of the default group."""
    group = dist.group.WORLD
    assert group is not None
    moe = our_layer(shape, recipe, group, device)
    x = tokens_of(shape, routing, group.rank(), device).requires_grad_()
    dy = values(shape.tokens, shape.dim, device=device.type, octaves=0.5)
    ours = moe.router.weight, moe.experts.w1, moe.experts.w3, moe.experts.w2
    plain = Weights(*(_local(w).detach().requires_grad_() for w in ours))

    def over(transport: PeerMemory | None, deduplicate: Deduplicate = None) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            moe.experts.exchange = choose_exchange(transport, deduplicate)
            return moe(x)[0]

        return forward

    def peer(ffn: Experts) -> Callable[[], Tensor]:
        return lambda: torch_layer(x, plain, shape.top_k, group, ffn)

    peers = {PEER: peer(experts_bf16), BF16_WIRE: peer(_experts_of(recipe))}

    def step(forward: Callable[[], Tensor]) -> Tensors:
        of_a_peer = forward in peers.values()
        y = forward()
        dx, *grads = torch.autograd.grad(y, (x, *(plain if of_a_peer else ours)), dy)
        if of_a_peer:
            dist.all_reduce(grads[0])  # the router's; ours is reduced in the backward
        return y.detach(), dx, *map(_local, grads)

    rows = shape.tokens * shape.top_k
    flops = 2 * 3 * rows * shape.dim * shape.hidden_dim
    t, _, _, e, k = shape
    table = [(places(routing, t, e, k, rank) < k).sum(0).tolist() for rank in range(group.size())]
    here = slice(group.rank() * len(plain.w1), (group.rank() + 1) * len(plain.w1))
    return Work(
        op="ep_layer",
        case={**shape._asdict(), "ranks": group.size(), "routing": routing, "recipe": recipe.name},
        flops=(flops, 3 * flops),
        outputs=OUTPUTS,
        forwards={
            **peers,
            IN_TURN: over(None),
            ONCE: over(None, "dispatch"),
            SUMMED: over(None, "both"),
            **{name: over(t) for name, t in transports.items()},
        },
        step=step,
        groups=torch.tensor(table, device=device).sum(0)[here] > 0,
        min_sqnr_db=MIN_SQNR_DB,
    )


def _local(w: Tensor) -> Tensor:
    return w.to_local() if isinstance(w, DTensor) else w


def _experts_of(recipe: Recipe) -> Experts:
    """The feed-forward on our products."""

    def ffn(groups: Tensor, weights: Weights, ends: Tensor) -> Tensor:
        out = grouped_swiglu_ffn(groups, weights.w1, weights.w3, weights.w2, ends, recipe=recipe)
        assert isinstance(out, Tensor)
        return out

    return ffn
