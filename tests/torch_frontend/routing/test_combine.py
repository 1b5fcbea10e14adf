"""The differentiable combine: its bits are the ops', its gradients plain torch's. Bytes: tests/conformance."""

import pytest
import torch
from mxep.torch_frontend import ops, weighted_combine
from torch import Tensor

from ...compare import sqnr_db

T, K, D = 9, 3, 40


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def operands(dtype: torch.dtype = torch.bfloat16, padding: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rows (T K + padding, D), probs, slots and the way back; one slot has no row."""
    rows = T * K + padding
    place = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: T * K].int()
    place[4] = -1
    order = torch.full((rows,), -1, dtype=torch.int32)
    order[place[place >= 0].long()] = torch.arange(T * K, dtype=torch.int32)[place >= 0]
    return (
        randn(rows, D, seed=1).to(dtype).requires_grad_(),
        randn(T, K, seed=2).requires_grad_(),
        place.view(T, K),
        order,
    )


def plain_sum(rows: Tensor, probs: Tensor | None, slots: Tensor) -> Tensor:
    picked = rows[slots.clamp_min(0).long()] * (slots >= 0).unsqueeze(-1)
    return (picked if probs is None else picked * probs.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, None], ids=str)
def test_values_and_gradients(weighted: bool, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    rows, probs, slots, order = operands(dtype)
    inputs = [rows, probs] if weighted else [rows]
    y = weighted_combine(rows, probs if weighted else None, slots, order, out_dtype=out_dtype)
    assert (y.dtype, y.shape) == (out_dtype or dtype, (T, D))
    dy = randn(T, D, seed=3).to(y.dtype)
    grads = torch.autograd.grad(y, inputs, dy)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = plain_sum(exact_inputs[0], exact_inputs[1] if weighted else None, slots)
    want = torch.autograd.grad(exact, exact_inputs, dy.double())
    for got, other in zip((y, *grads), (exact, *want), strict=True):
        # Measured: 55.3 where something is rounded to bf16, else 143.0.
        floor = 142 if got.dtype == torch.float32 and dy.dtype == torch.float32 else 54
        assert torch.equal(got.double(), other) or sqnr_db(got, other) > floor
    assert [g.dtype for g in grads] == [x.dtype for x in inputs]
    assert (grads[0][order < 0] == 0).all()


def test_the_bits_are_those_of_the_ops() -> None:
    rows, probs, slots, order = operands()
    y, dy = weighted_combine(rows, probs, slots, order), randn(T, D, seed=3).bfloat16()
    assert torch.equal(y, ops.combine(rows.detach(), slots, probs.detach()))
    want = ops.combine_bwd(dy, rows.detach(), slots, order, probs.detach())
    assert all(map(torch.equal, torch.autograd.grad(y, [rows, probs], dy), want))
    unweighted = weighted_combine(rows, None, slots, order)
    want, _ = ops.combine_bwd(dy, rows.detach(), slots, order, torch.empty(0))
    assert torch.equal(torch.autograd.grad(unweighted, rows, dy)[0], want)


def test_without_probabilities_no_row_is_saved() -> None:
    rows, probs, slots, order = operands()
    for weights, expected in ((probs, True), (None, False)):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            weighted_combine(rows, weights, slots, order)
        assert any(t.data_ptr() == rows.data_ptr() for t in saved) == expected


@pytest.mark.parametrize("weighted", [True, False])
def test_whole_graph(weighted: bool) -> None:
    torch._dynamo.reset()
    rows, probs, slots, order = operands()
    weights, inputs = (probs, [rows, probs]) if weighted else (None, [rows])
    want = weighted_combine(rows, weights, slots, order)
    got = torch.compile(weighted_combine, fullgraph=True, backend="aot_eager")(rows, weights, slots, order)
    dy = randn(T, D, seed=3).bfloat16()
    assert torch.equal(got, want)
    assert all(map(torch.equal, *(torch.autograd.grad(y, inputs, dy) for y in (got, want))))


def test_bad_input() -> None:
    rows, probs, slots, order = operands()
    with pytest.raises(TypeError, match="weighted_combine: rows: got a list"):
        weighted_combine([rows], probs, slots, order)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weighted_combine: probs: got a list"):
        weighted_combine(rows, [1.0], slots, order)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weighted_combine: slots: got shape \(27,\); allowed: \(T, K\)"):
        weighted_combine(rows, None, slots.reshape(-1), order)
    with pytest.raises(ValueError, match="weighted_combine: order: got shape"):
        weighted_combine(rows, probs, slots, order[1:])
    with pytest.raises(ValueError, match=r"combine: probs: got shape \(9, 2\)"):
        weighted_combine(rows, probs[:, :2], slots, order)
    with pytest.raises(TypeError, match=r"combine: out_dtype: got torch\.float16"):
        weighted_combine(rows, probs, slots, order, out_dtype=torch.float16)
