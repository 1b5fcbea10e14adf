"""torchtitan's routed experts under expert parallelism, on two ranks; run by test_torchtitan.py."""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.distributed as dist
from mxep.torch_frontend.integrations.torchtitan import routed_experts
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.models.common.config_utils import make_routed_experts_config

from ...compare import sqnr_db

RANKS = 2
D, F, E, K = 64, 96, 8, 2
# Of the weights' gradients, whose sums have another order, and in "mxfp8" some blocks another scale. Measured: 142.5,
# 144.4 and 114.0 dB. Less 3.
FLOORS_DB = {"bf16": 139.5, "mxfp8_wgrad_with_hp": 141.4, "mxfp8": 111.0}


@cache
def world() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))


def two_ranks_are_one(recipe: str) -> None:
    shapes = {"w1_EFD": (E, F, D), "w2_EDF": (E, D, F), "w3_EFD": (E, F, D)}
    weights = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in shapes.items()}
    results = []
    for degree in (RANKS, 1):
        config = make_routed_experts_config(
            dim=D, hidden_dim=F, num_experts=E, top_k=K, param_init={}, comm_backend="standard"
        )
        config.inner_experts.num_experts = E // degree
        module = routed_experts(config, recipe).build()
        module.token_dispatcher.wire_meshes(ep_mesh=world() if degree > 1 else None)
        mine = {name: w.chunk(degree)[dist.get_rank() % degree] for name, w in weights.items()}
        module.inner_experts.load_state_dict(mine)
        results.append(outcome(module))
    (y, dx, dscores, gradients), (want, want_dx, want_dscores, whole) = results
    # A row's bytes depend neither on the rank that multiplies it nor on its neighbours.
    assert torch.equal(y, want), recipe
    assert torch.equal(dx, want_dx), recipe
    assert torch.equal(dscores, want_dscores), recipe
    for name, gradient in gradients.items():
        total = whole[name]
        dist.all_reduce(total)  # of the tokens of both ranks
        decibels = sqnr_db(gradient, total.chunk(RANKS)[dist.get_rank()])
        assert decibels > FLOORS_DB[recipe], (recipe, name, decibels)


def outcome(module: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x = torch.randn(1, 48, D, generator=generator).bfloat16().requires_grad_()
    scores, ids = torch.rand(1, 48, E, generator=generator).topk(K)
    scores.requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=E)
    y = module(x, scores, ids, counts)
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    assert x.grad is not None
    assert scores.grad is not None
    return y.detach(), x.grad, scores.grad, {n: p.grad for n, p in module.inner_experts.named_parameters()}


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    assert ranks == RANKS
    return {recipe: partial(two_ranks_are_one, recipe) for recipe in FLOORS_DB}
