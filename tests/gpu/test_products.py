"""The differentiable product on a GPU: what "auto" multiplies, CUDA graphs, streams, and weights that change."""

import pytest
import torch
from mxep.torch_frontend import keep_quantized_weights, mxfp8_grouped_mm, weights
from torch import Tensor, nn

from .cases import DEVICE

M, N, K, ENDS = 256, 128, 192, (64, 64, 192)


def operands(seed: int) -> tuple[Tensor, nn.Parameter, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(M, K, generator=generator, device=DEVICE).bfloat16().requires_grad_()
    w = nn.Parameter(torch.empty(len(ENDS), N, K, device=DEVICE, dtype=torch.bfloat16))
    nn.init.normal_(w, generator=generator)
    return x, w, torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)


def step(x: Tensor, w: Tensor, offs: Tensor, compute: str) -> tuple[Tensor, ...]:
    """The product and both gradients, the weights' in MXFP8."""
    out = mxfp8_grouped_mm(x, w.mT, offs, compute=compute)
    return out.detach(), *torch.autograd.grad(out, (x, w), torch.ones_like(out))


def equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_auto_folds_on_hopper_alone() -> None:
    inputs = operands(0)
    hopper = torch.cuda.get_device_capability(DEVICE)[0] == 9
    exact, fold, auto = (step(*inputs, compute) for compute in ("exact", "fold", "auto"))
    assert not equal(exact, fold)
    assert equal(auto, fold if hopper else exact)


@pytest.mark.parametrize("compute", ["exact", "fold"])
def test_a_graph_quantizes_the_weights_that_it_finds(compute: str) -> None:
    x, w, offs = operands(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x, w, offs, compute)
    torch.cuda.current_stream().wait_stream(side)
    before = step(x, w, offs, compute)  # from here on the weights' bytes are kept, for eager calls
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, w, offs, compute)
    graph.replay()
    assert equal(captured, before)
    with torch.no_grad():
        w.mul_(3)
    graph.replay()
    with keep_quantized_weights(False):
        assert equal(captured, step(x, w, offs, compute))
    assert not equal(captured, before)


def test_every_stream_keeps_bytes_of_its_own() -> None:
    x, w, offs = operands(0)
    want = step(x, w, offs, "fold")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = step(x, w, offs, "fold")
    side.synchronize()
    assert equal(got, want)
    assert len(weights._kept[w].operands) == 4  # along K and along N, on each stream
