"""Differentiable SwiGLU: fp64 autograd, compiled graphs, autocast. Its bytes: tests/conformance."""

import pytest
import torch
from mxep.torch_frontend import SwiGLU, ops, swiglu
from torch import Tensor


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
def test_the_bits_are_those_of_the_ops(weighted: bool, activation: SwiGLU) -> None:
    leaves = operands(weighted)
    given = [x.detach() for x in leaves] + [torch.empty(0)] * (not weighted)
    numbers = {name: getattr(activation, name) or 0.0 for name in ("alpha", "limit", "offset")}
    h = swiglu(*leaves, activation=activation)
    assert torch.equal(h, ops.swiglu(*given, **numbers))
    want = ops.swiglu_bwd(cotangent(h), *given, **numbers)
    for g, w in zip(torch.autograd.grad(h, leaves, cotangent(h)), want, strict=False):
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


def test_whole_graph() -> None:
    torch._dynamo.reset()
    inputs = operands(True)
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
