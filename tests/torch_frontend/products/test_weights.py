"""Weights are quantized in the call that uses them."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mxep.core_kernels.formats import WEIGHT_HEADROOM
from mxep.torch_frontend import MoE, Recipe, RouterConfig, ops, quantize_weights
from mxep.torch_frontend.integrations.torchao import mxfp8_grouped_mm
from mxep.torch_frontend.products import weights
from mxep.torch_frontend.products.forms.fold import FoldForm
from mxep.torch_frontend.products.forms.mx import Upcast
from torch import Tensor, nn

from .one_weight import ENDS, X, clone, equal, other_memory, parameter, step, through_data, written_in_place


@pytest.mark.parametrize("compute", ["exact", "fold"])
def test_both_ways_in_one_read_in_every_call(compute: str, quantized: list[str]) -> None:
    w, once = parameter(), ["quantize_matrix_fold" if compute == "fold" else "quantize_both"]
    first = step(w, compute=compute)
    assert quantized == once
    assert equal(step(w, compute=compute), first)
    assert quantized == 2 * once
    quantized.clear()
    with torch.no_grad():  # no backward follows: one way
        mxfp8_grouped_mm(X, w.mT, ENDS, compute=compute)
    mxfp8_grouped_mm(X, w.mT, ENDS, compute=compute)  # and none asks for the input gradient
    assert quantized == 2 * (["quantize_row_fold"] if compute == "fold" else ["quantize_row"])


@pytest.mark.parametrize("rounding", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_way_and_both_ways_fold_to_the_same_bytes(dtype: torch.dtype, rounding: int) -> None:
    """Of weights with rows and columns whose largest scale is not among the first 256 values, and with others."""
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(2, 320, 352, generator=rng).div(torch.rand(2, 320, 352, generator=rng)).to(dtype)
    form = FoldForm("fold", rounding, wgrad_mx=True, upcasts=False)
    for given in (w, w.mT.contiguous().mT):
        both = weights.quantize_for_call(given, None, form, both=True)
        alone = weights.quantize_for_call(given, None, form, both=False).along_k, weights.along_n(given, form)
        for got, want in zip(alone, both, strict=True):
            assert equal(list(got), list(want))
    _, needed = ops.quantize_row_fold(w, rounding=rounding)
    _, first = ops.quantize_row_fold(w[..., :256].contiguous(), rounding=rounding)
    got = form.along_k(w).sf
    assert torch.equal(got, torch.maximum(first + WEIGHT_HEADROOM, needed))
    assert (got == needed).any()
    assert (got > needed).any()


def test_exact_products_on_hopper_multiply_them_dequantized(
    quantized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = parameter()
    want = step(w, compute="exact")
    quantized.clear()
    monkeypatch.setattr(weights, "arch_of", lambda device: "sm_90")
    assert equal(step(w, compute="exact"), want)
    assert quantized == ["quantize_both", "dequantize", "dequantize"]
    held = quantize_weights(w, "mxfp8")
    assert held.form == "fold"
    held = quantize_weights(w, Recipe.parse("mxfp8", compute="exact"))
    assert isinstance(held.as_stored, Upcast)
    assert torch.equal(held.as_stored.x, ops.dequantize(*ops.quantize_row(w.detach())))
    assert torch.equal(held.transposed.x, ops.dequantize(*ops.quantize_col(w.detach())))


@pytest.mark.parametrize("write", [written_in_place, through_data, other_memory])
def test_every_write_is_seen(write: Callable[[nn.Parameter], None]) -> None:
    w = parameter()
    before = step(w)
    write(w)
    assert not equal(step(w), before)
    assert equal(step(w), step(clone(w)))


def test_a_backward_multiplies_the_weights_of_its_forward() -> None:
    w, x = parameter(), X.clone().requires_grad_()
    want = step(w)[1]
    out = mxfp8_grouped_mm(x, w.mT, ENDS)
    through_data(w)
    assert torch.equal(torch.autograd.grad(out, x, torch.ones_like(out))[0], want)


@pytest.mark.parametrize("compute", ["exact", "fold"])
def test_a_gathered_weight_leaves_no_byte_behind(compute: str, quantized: list[str]) -> None:
    """FSDP2 writes what it gathers behind the version counter's back and frees it after the forward. Each pass reads
    the weight once."""
    gathered, x = nn.Parameter(parameter().detach().clone()), X.clone().requires_grad_()
    assert gathered._version == 0
    want = step(parameter(), compute=compute)
    quantized.clear()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = mxfp8_grouped_mm(x, gathered.mT, ENDS, compute=compute)
    values, storage = gathered.detach().clone(), gathered.untyped_storage()
    assert all(t.dtype != torch.uint8 or t.dim() < 3 for t in saved)
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    gathered.data.copy_(values)
    grads = torch.autograd.grad(out, [x, gathered], torch.ones_like(out))
    assert equal([out.detach(), *grads], want)
    once = {"exact": ["quantize_row", "quantize_col"], "fold": ["quantize_row_fold", "quantize_matrix_fold_t"]}
    assert quantized == once[compute]


def test_nothing_outlives_the_call() -> None:
    """Neither module nor package holds a tensor more after some steps than after one."""

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    moe = MoE(64, 96, num_experts=4, router=RouterConfig(top_k=2), recipe="mxfp8")
    x = torch.randn(32, 64)
    moe(x)[0].sum().backward()
    before = tensors()
    for _ in range(3):
        moe(x)[0].sum().backward()
    with torch.no_grad():
        moe(x)
    assert tensors() <= before  # what other tests left behind may go meanwhile


def test_a_compiled_function_sees_the_weight_change() -> None:
    torch._dynamo.reset()
    w = parameter()

    def run(w: Tensor, x: Tensor) -> Tensor:
        return mxfp8_grouped_mm(x, w.mT, ENDS)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for change in (through_data, written_in_place):
        x, again = X.clone().requires_grad_(), X.clone().requires_grad_()
        got, want = compiled(w, x), run(w, again)
        assert torch.equal(got, want)
        ones = torch.ones_like(got)
        assert equal(list(torch.autograd.grad(got, [x, w], ones)), list(torch.autograd.grad(want, [again, w], ones)))
        change(w)


def test_moves_casts_and_loads_after_a_forward(tmp_path: Path) -> None:
    """Nothing refers to a parameter weakly: torch.utils.swap_tensors refuses those."""
    moe = MoE(64, 64, 4, RouterConfig(2))
    moe(torch.randn(8, 64))[0].sum().backward()
    dcp.save({"model": moe.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        moe.zero_grad()
        moe.to(torch.bfloat16).to(torch.float32)
        moe.load_state_dict(moe.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    dcp.load({"model": moe.state_dict()}, checkpoint_id=str(tmp_path), no_dist=True)
    moe(torch.randn(8, 64))
