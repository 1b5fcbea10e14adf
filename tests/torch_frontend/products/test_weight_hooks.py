"""The weights of experts are read when the experts run: forward hooks may assign, write or bring them before."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.prune as prune
from mxep.torch_frontend import MoE, RouterConfig, SharedExpert
from torch import Tensor, nn

D, HIDDEN = 64, 96
NAMES = ("w1", "w2", "w3")


def layer() -> MoE:
    torch.manual_seed(0)
    return MoE(D, HIDDEN, 4, RouterConfig(2))


def prune_half(experts: nn.Module) -> None:
    for name in NAMES:
        prune.random_unstructured(experts, name, 0.5)


def normalize(experts: nn.Module) -> None:
    """The deprecated function recomputes a weight in a pre-hook, the parametrization of the same name does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for name in NAMES:
            nn.utils.weight_norm(experts, name)


def halve(experts: nn.Module) -> None:
    """The weights are halved for the call."""

    @torch.no_grad()
    def before(module: nn.Module, args: object) -> None:
        for w in module.parameters():
            w.mul_(0.5)

    @torch.no_grad()
    def after(module: nn.Module, args: object, out: object) -> None:
        for w in module.parameters():
            w.mul_(2)

    experts.register_forward_pre_hook(before)
    experts.register_forward_hook(after)


def offload(experts: nn.Module) -> None:
    """The weights are in other memory between calls, as with accelerate, DeepSpeed and a block swap."""
    home = {name: w.detach().clone() for name, w in experts.named_parameters()}

    def bring(module: nn.Module, args: object = ()) -> None:
        for name, w in module.named_parameters():
            w.data = home[name].clone()

    def free(module: nn.Module, args: object = (), out: object = None) -> None:
        for w in module.parameters():
            w.data = torch.zeros_like(w.data)

    experts.register_forward_pre_hook(bring)
    experts.register_forward_hook(free)
    free(experts)


def both(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's result where x needs a gradient, as in every layer of a model but the first, and where it needs
    none, which runs second: the first hooks would assign the weights for it."""
    needed = moe(x.clone().requires_grad_())[0].detach()
    with torch.no_grad():
        return needed, moe(x)[0]


@pytest.mark.parametrize("change", [prune_half, normalize, halve, offload])
def test_hooks_that_change_the_weights(change: Callable[[nn.Module], None]) -> None:
    moe, x = layer(), torch.randn(48, D)
    change(moe.experts)
    optimizer = torch.optim.SGD(moe.parameters(), lr=1.0)
    for _ in range(2):
        needed, not_needed = both(moe, x)
        assert torch.equal(needed, not_needed)
        moe(x.requires_grad_())[0].square().mean().backward()
        if change is not offload:  # its parameters are zeros now
            optimizer.step()
        optimizer.zero_grad()
        x = x.detach()


@pytest.mark.parametrize("change", [prune_half, normalize, halve, offload])
def test_hooks_of_the_shared_expert(change: Callable[[nn.Module], None]) -> None:
    """Its own hooks change its weights: the layer is equal to a layer without hooks that has the changed weights."""
    torch.manual_seed(0)
    moe, x = MoE(D, HIDDEN, 4, RouterConfig(2), shared=SharedExpert(32)), torch.randn(48, D)
    assert moe.shared_expert is not None
    change(moe.shared_expert)
    with torch.no_grad():
        for w in moe.parameters():
            w.add_(0.01)  # an optimizer step
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, args: object, out: object) -> None:
        seen.update({name: getattr(module, name).detach().clone() for name in NAMES})

    handle = moe.shared_expert.register_forward_hook(look, prepend=True)
    got = moe(x.requires_grad_())[0].detach()
    handle.remove()
    plain = MoE(D, HIDDEN, 4, RouterConfig(2), shared=SharedExpert(32))
    state = {name: w for name, w in moe.state_dict().items() if not name.startswith("shared_expert.")}
    plain.load_state_dict(state | {f"shared_expert.{name}": w for name, w in seen.items()})
    assert torch.equal(got, plain(x)[0].detach())


def test_pruned_experts_learn() -> None:
    """Loss after 25 steps of the same layer: 0.04 where x needs no gradient, and 0.41 once where it needed one."""
    losses = []
    for needed in (False, True):
        moe = layer()
        prune_half(moe.experts)
        optimizer = torch.optim.SGD(moe.parameters(), lr=3.0, momentum=0.9)
        x = torch.randn(64, D, generator=torch.Generator().manual_seed(1))
        for _ in range(10):
            loss = (moe(x.clone().requires_grad_(needed))[0] - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_brought_weights_are_multiplied() -> None:
    moe, x = layer(), torch.randn(48, D)
    with torch.no_grad():
        want = moe(x)[0]
    offload(moe.experts)
    for y in both(moe, x):
        assert torch.equal(y, want)
