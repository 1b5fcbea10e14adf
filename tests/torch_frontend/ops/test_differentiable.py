"""What autograd, its tools and its other modes get from the differentiable functions: a gradient, or a sentence."""

import gc
from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from mxep.torch_frontend import (
    MoE,
    MXTensor,
    RouterConfig,
    gather_rows,
    grouped_swiglu_ffn,
    ops,
    swiglu,
    weighted_combine,
)
from mxep.torch_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    bf16_grouped_mm,
    fp8_rowwise_grouped_mm,
    mxfp8_grouped_mm,
    permute_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
    unpermute_hp_fwd_mxfp8_bwd,
)
from mxep.torch_frontend.routing.permute import spread_rows
from torch import Tensor

T = 64
ENDS = torch.tensor([32, 64], dtype=torch.int32)
SAME = torch.arange(T, dtype=torch.int32)
W, W2 = (torch.randn(s, generator=torch.Generator().manual_seed(0)).bfloat16() for s in ((2, 96, 64), (2, 64, 96)))


def x(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(T, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "mxfp8_grouped_mm": lambda a: mxfp8_grouped_mm(a, W.mT, ENDS),
    "bf16_grouped_mm": lambda a: bf16_grouped_mm(a, W.mT, ENDS),
    "fp8_rowwise_grouped_mm": lambda a: fp8_rowwise_grouped_mm(a, W.mT, ENDS),
    "grouped_swiglu_ffn": lambda a: grouped_swiglu_ffn(a, W, W, W2, ENDS),
    "swiglu": lambda a: swiglu(a, a),
    "weighted_combine": lambda a: weighted_combine(a, torch.ones(T, 1), SAME[:, None], SAME),
    "weighted_combine, no probs": lambda a: weighted_combine(a, None, SAME[:, None], SAME),
    "gather_rows": lambda a: gather_rows(a, SAME, SAME),
    "spread_rows": lambda a: spread_rows(a, SAME, SAME, 1),
    "permute": lambda a: permute_mxfp8_fwd_hp_bwd(a, torch.tensor([T]), 1, 1)[1],
    "unpermute": lambda a: unpermute_hp_fwd_mxfp8_bwd(a, SAME, (T + 1, 64)),
    "dispatch": lambda a: a2a_dispatch_mxfp8_fwd_hp_bwd(a, [T], [T]).dequantize(),
    "combine": lambda a: a2a_combine_hp_fwd_mxfp8_bwd(a, [T], [T], mxfp8_bwd=False),
    "to_mxfp8_a2a_dequant": lambda a: to_mxfp8_a2a_dequant(a, [T], [T]),
    "MXTensor": lambda a: MXTensor.quantize(a).dequantize(),
}
each = pytest.mark.parametrize("function", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
REVERSE = r"allowed: reverse mode"


@each
def test_a_first_derivative(function: Callable[[Tensor], Tensor]) -> None:
    leaf = x().requires_grad_()
    y = function(leaf)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    assert dx.shape == leaf.shape


@each
def test_a_graph_of_the_backward_raises(function: Callable[[Tensor], Tensor]) -> None:
    leaf = x().requires_grad_()
    y = function(leaf)
    with pytest.raises(NotImplementedError, match=r": backward: got create_graph=True; allowed: first derivatives"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)


@each
def test_other_modes_raise(function: Callable[[Tensor], Tensor]) -> None:
    for run in (
        lambda: torch.func.grad(lambda a: function(a).sum())(x()),
        lambda: torch.func.vjp(function, x()),
        lambda: torch.func.jvp(function, (x(),), (x(),)),
        lambda: torch.func.jacrev(function)(x()),
        lambda: torch.vmap(function)(x()[None]),
    ):
        with pytest.raises(NotImplementedError, match=REVERSE):
            run()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=REVERSE):
        function(forward_ad.make_dual(x(), x()))


def test_raw_ops_have_no_derivative_of_any_kind() -> None:
    def op(a: Tensor) -> Tensor:
        return ops.permute_rows(a, SAME)

    none = r"permute_rows\.default: .*; ops have no gradient: use the differentiable functions"
    with pytest.raises(NotImplementedError, match=none):
        op(x().requires_grad_()).sum().backward()
    with pytest.raises(NotImplementedError, match=none):
        torch.func.grad(lambda a: op(a).sum())(x())
    with pytest.raises(NotImplementedError, match=none):
        torch.func.jvp(op, (x(),), (x(),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=none):
        op(forward_ad.make_dual(x(), x()))
    with forward_ad.dual_level():  # which other tensors have
        assert torch.equal(op(x()), x())
    assert torch.equal(torch.vmap(op)(x()[None])[0], x())


def test_a_gradient_penalty_is_refused_not_dropped() -> None:
    a, w = x(dtype=torch.float32).requires_grad_(), W.float().requires_grad_()
    y = mxfp8_grouped_mm(a, w.mT, ENDS, out_dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="grouped_mm: backward"):
        torch.autograd.grad(y.sum(), a, create_graph=True)


def test_anomaly_detection() -> None:
    torch.manual_seed(0)
    moe = MoE(64, 64, 4, RouterConfig(2))
    with torch.autograd.set_detect_anomaly(True):
        moe(torch.randn(8, 64))[0].sum().backward()
        poisoned = torch.randn(8, 64)
        poisoned[3] = float("nan")
        with pytest.raises(RuntimeError, match="returned nan values"):
            moe(poisoned.requires_grad_())[0].sum().backward()


def test_hooks_look_at_gradients() -> None:
    moe, norms = MoE(64, 64, 4, RouterConfig(2)), []

    def look(module: object, into: tuple[Tensor | None, ...], out: tuple[Tensor, ...]) -> None:
        grads = [g for g in (*into, *out) if g is not None and g.is_floating_point()]
        norms.extend((g.norm().item(), g.abs().max().item(), g.mean().item(), g.isfinite().all().item()) for g in grads)
        for g in grads:
            values = g.dequantize() if isinstance(g, MXTensor) else g
            assert torch.equal(g.norm(), values.norm())

    moe.experts.register_full_backward_hook(look)
    moe(torch.randn(8, 64).requires_grad_())[0].sum().backward()
    assert len(norms) == 3, "of the rows, of their weights, and of the output"
    assert all(finite for *_, finite in norms)


def test_a_gradient_in_mx_is_cast_and_moved() -> None:
    leaf = torch.randn(16, 64, requires_grad=True)
    a2a_combine_hp_fwd_mxfp8_bwd(leaf.bfloat16(), [16], [16]).sum().backward()
    assert torch.equal(leaf.grad.dequantize(), torch.ones(16, 64))
    mx = MXTensor.quantize(x())
    on_meta = mx.to("meta")
    assert (type(on_meta), on_meta.q.device.type, on_meta.sf.device.type) == (MXTensor, "meta", "meta")
    assert mx.to("cpu").q is mx.q
    with pytest.raises(NotImplementedError, match="layout: got torch"):
        torch.ops.aten._to_copy.default(mx, layout=torch.sparse_coo)


def test_saved_rows_are_offloaded() -> None:
    """`saved_tensors_hooks` that move what is saved, and bring it back."""
    torch.manual_seed(0)
    moe, rows = MoE(64, 64, 4, RouterConfig(2)), torch.randn(8, 64)
    want = torch.autograd.grad(moe(rows)[0].sum(), list(moe.parameters()))
    moved: list[type] = []

    def pack(t: Tensor) -> tuple[Tensor, Tensor]:
        moved.append(type(t))
        return t.to("meta"), t  # the move itself, and the bytes to return

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda pair: pair[1]):
        y = moe(rows)[0]
    got = torch.autograd.grad(y.sum(), list(moe.parameters()))
    assert MXTensor in moved
    assert all(map(torch.equal, got, want))


def test_what_an_mx_gradient_cannot_do_names_the_remedy() -> None:
    leaf = x().requires_grad_()
    with pytest.raises(NotImplementedError, match="pass mxfp8_bwd=False to a2a_combine"):
        a2a_combine_hp_fwd_mxfp8_bwd(leaf * 2, [T], [T]).sum().backward()
    a2a_combine_hp_fwd_mxfp8_bwd(leaf * 2, [T], [T], mxfp8_bwd=False).sum().backward()


def test_one_rank_gives_memory_of_its_own() -> None:
    rows = torch.ones(16, 64)
    a2a_combine_hp_fwd_mxfp8_bwd(rows, [16], [16]).mul_(3)
    assert (rows == 1).all()
    y = a2a_combine_hp_fwd_mxfp8_bwd(torch.ones(16, 64, requires_grad=True), [16], [16], mxfp8_bwd=False)
    y += 1
    assert (y == 2).all()


def test_a_step_leaves_no_cycle_of_tensors() -> None:
    """A cycle keeps what the backward has read until the next garbage collection."""
    moe = MoE(64, 96, 8, RouterConfig(3), dtype=torch.bfloat16)
    x = torch.randn(50, 64, dtype=torch.bfloat16).requires_grad_()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        moe(x)[0].sum().backward()
        gc.collect()
        assert not [type(found) for found in gc.garbage if isinstance(found, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
