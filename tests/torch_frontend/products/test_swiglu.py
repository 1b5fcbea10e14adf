"""Differentiable SwiGLU: fp64 autograd, compiled graphs, autocast. Its bytes: tests/conformance."""

import pytest
import torch
from mxep.torch_frontend import SwiGLU, ops, swiglu
from torch import Tensor

from ...compare import sqnr_db


def operands(weighted: bool, rows: int = 37, width: int = 100) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(rows, width, generator=gen).bfloat16().requires_grad_() for _ in range(2))
    return (gate, up, torch.rand(rows, generator=gen).requires_grad_()) if weighted else (gate, up)


def cotangent(h: Tensor) -> Tensor:
    return torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def formula(gate: Tensor, up: Tensor, activation: SwiGLU) -> Tensor:
    """As the models write it."""
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.offset)


CLAMPED = SwiGLU(alpha=1.702, limit=1.5, offset=1.0)  # a seventh of up is beyond the limit, and some are at it


@pytest.mark.parametrize("activation", [SwiGLU(), CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_fp64_autograd(weighted: bool, activation: SwiGLU) -> None:
    inputs = operands(weighted)
    assert all((x == CLAMPED.limit).any() for x in inputs[:2])
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    gate, up, *prob = exact_inputs
    exact = formula(gate, up, activation) * (prob[0][:, None] if weighted else 1)
    h = swiglu(*inputs, activation=activation)
    assert (h.dtype, h.shape) == (torch.bfloat16, inputs[0].shape)
    got = [h, *torch.autograd.grad(h, inputs, cotangent(h))]
    want = [exact, *torch.autograd.grad(exact, exact_inputs, cotangent(h).double())]
    for name, g, w in zip(("h", "gate", "up", "prob"), got, want, strict=False):
        # One rounding to bf16: measured 55.4 and more. prob's gradient stays fp32: measured 139.7.
        assert sqnr_db(g, w) > (138 if name == "prob" else 54.4), (name, sqnr_db(g, w))


def test_the_bits_are_those_of_the_ops() -> None:
    gate, up, prob = operands(True)
    h = swiglu(gate, up, prob)
    assert torch.equal(h, ops.swiglu(gate.detach(), up.detach(), prob.detach()))
    want = ops.swiglu_bwd(cotangent(h), gate.detach(), up.detach(), prob.detach())
    for g, w in zip(torch.autograd.grad(h, [gate, up, prob], cotangent(h)), want, strict=True):
        assert torch.equal(g, w)


def test_strided_operands_and_gradients() -> None:
    gate, up, prob = operands(True, 64, 64)
    h = swiglu(gate, up, prob)
    turned = swiglu(gate.t().contiguous().t(), up.t().contiguous().t(), torch.stack([prob, prob], 1)[:, 0])
    assert torch.equal(turned, h)
    gradient = cotangent(h)
    one, other = (torch.autograd.grad(x, gate, g) for x, g in ((h, gradient), (turned, gradient.t().contiguous().t())))
    assert torch.equal(one[0], other[0])


def test_autocast_changes_nothing() -> None:
    gate, up, prob = operands(True)
    want = swiglu(gate * 2**60, up, prob)
    with torch.autocast("cpu", torch.float16):
        got = swiglu(gate * 2**60, up, prob)
    assert torch.equal(got, want)


@pytest.mark.parametrize("weighted", [True, False])
def test_whole_graph(weighted: bool) -> None:
    torch._dynamo.reset()
    inputs = operands(weighted)
    compiled = torch.compile(swiglu, fullgraph=True, backend="aot_eager")
    for activation in (SwiGLU(), CLAMPED, SwiGLU(limit=0.25)):  # the same program with other numbers
        want, got = (function(*inputs, activation=activation) for function in (swiglu, compiled))
        assert torch.equal(got, want)
    grads = (torch.autograd.grad(h, inputs, cotangent(want)) for h in (got, want))
    for g, w in zip(*grads, strict=True):
        assert torch.equal(g, w)


def test_bad_input() -> None:
    gate, up, prob = (x.detach() for x in operands(True))
    with pytest.raises(TypeError, match=r"swiglu: gate: got a list; allowed: a torch\.Tensor"):
        swiglu([gate], up)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="swiglu: prob: got a float"):
        swiglu(gate, up, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"swiglu: gate: got dtype torch\.float32; allowed: bfloat16"):
        swiglu(gate.float(), up)
    with pytest.raises(ValueError, match=r"swiglu: prob: got shape \(37, 1\)"):
        swiglu(gate, up, prob[:, None])
    with pytest.raises(TypeError, match=r"swiglu: activation: got 'silu'; allowed: a SwiGLU"):
        swiglu(gate, up, prob, "silu")  # type: ignore[arg-type]
