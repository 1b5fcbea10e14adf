"""The whole layer in a CUDA graph, forward and backward, with dropless routing: no size is read by the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mxep.torch_frontend import MoE, RouterConfig
from torch import Tensor, nn

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 500, 256, 384, 8, 3
RECIPES = ["mxfp8", "mxfp8_wgrad_with_hp", "bf16"]


class Layer(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K), recipe=recipe, dtype=torch.bfloat16, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    """x and dy of another routing for every seed."""
    rng = torch.Generator("cuda").manual_seed(seed)
    x, dy = torch.randn(2, TOKENS, DIM, generator=rng, device="cuda", dtype=torch.bfloat16)
    return x.contiguous().requires_grad_(), dy.contiguous()


def step(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), dy)]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_of_the_layer_needs_no_synchronisation(recipe: str) -> None:
    layer, inputs = Layer(recipe), tokens(0)
    step(layer, *inputs)
    with no_synchronisation():
        step(layer, *inputs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_of_a_step_replays_on_tokens_of_another_routing(recipe: str) -> None:
    layer, (x, dy) = Layer(recipe), tokens(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layer, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x, dy)
    for seed in (1, 2):
        others = tokens(seed)
        want = step(layer, *others)
        with torch.no_grad():
            x.copy_(others[0])
            dy.copy_(others[1])
        graph.replay()
        for got, expected in zip(captured, want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_make_graphed_callables(recipe: str) -> None:
    layer = Layer(recipe)
    want = [step(layer, *tokens(seed)) for seed in (1, 2)]
    graphed: Any = torch.cuda.make_graphed_callables(layer, (tokens(0)[0],))
    for seed, expected in zip((1, 2), want, strict=True):
        x, dy = tokens(seed)
        for got, value in zip(step(graphed, x, dy), expected, strict=True):
            assert torch.equal(got, value)
