"""A model of two blocks, alone and under `shard_moe`, and what of both is compared, for the checks of fsdp_ranks.py."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mxep.torch_frontend import MoE, RouterConfig, SharedExpert, clip_grad_norm_, shard_moe
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .ep_training import whole

VOCAB, D, HIDDEN, TOKENS = 32, 64, 96, 48


class Block(nn.Module):
    def __init__(self, recipe: str, prob_in: Any, experts: int) -> None:
        super().__init__()
        self.norm, self.dense = nn.RMSNorm(D), nn.Linear(D, D)
        options = {"recipe": recipe, "bias": True, "shared": SharedExpert(32)}
        self.moe = MoE(D, HIDDEN, experts, RouterConfig(2, prob_in=prob_in), **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x + self.dense(x)))[0]


class Model(nn.Module):
    """Without the auxiliary loss, which is not a mean over data-parallel ranks."""

    def __init__(self, recipe: str = "bf16", prob_in: str = "combine", experts: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.blocks = nn.ModuleList(Block(recipe, prob_in, experts) for _ in range(2))
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


@cache
def mesh_of(ep: int) -> DeviceMesh:
    """One for all checks: a thread of every group polls 100 times a second."""
    return init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("dp", "ep"))


def fresh(**options: Any) -> Model:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Model(**options)


def sharded(ep: int, policy: MixedPrecisionPolicy | None = None, **options: Any) -> Any:
    return shard_moe(fresh(**options), mesh_of(ep), [Block], mp_policy=policy)


def batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(step))


def mine(tokens: Tensor) -> Tensor:
    return tokens.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float(), (7 * tokens + 3) % VOCAB)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def require_near(got: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor] | None = None) -> None:
    """Every weight within 0.5% of the largest change of that weight.

    Measured: 1.6e-5 in training, 2.4e-7 of gradients; 1.3e-3 where a row of bf16 rounds the other way. A gradient that
    is twice too large changes a weight by more than a tenth.
    """
    assert got.keys() == want.keys()
    for name, value in want.items():
        change = (value if start is None else value - start[name]).abs().max()
        share = ((got[name] - value).abs().max() / change).item()
        assert share < 5e-3, (name, share)


def require_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert not [name for name in want if not torch.equal(got[name], want[name])]


def train(model: nn.Module, part: Callable[[Tensor], Tensor], steps: int, make: Callable[..., Any]) -> list[float]:
    optimizer, norms = make(model.parameters()), []
    for step in range(steps):
        loss_of(model, part(batch(step))).backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms
