"""compute="fold" and "exact": which bytes are multiplied, what is read to make them, and when "auto" folds."""

from collections import Counter
from typing import Any

import pytest
import torch
from mxep.core_kernels.formats import WEIGHT_HEADROOM, spans
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import MXTensor, ops
from mxep.torch_frontend.integrations.torchao import mxfp8_grouped_mm
from mxep.torch_frontend.ops import device as devices
from mxep.torch_frontend.ops import direct
from mxep.torch_frontend.products import weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...compare import sqnr_db

M, K, N, ENDS = 160, 96, 64, (64, 64, 128)


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, w, dout = (torch.randn(s, generator=generator) for s in ((M, K), (3, N, K), (M, N)))
    scales = torch.exp2(torch.randint(-6, 6, (M, K // 32), generator=generator)).repeat_interleave(32, 1)
    return (a * scales).bfloat16(), w.bfloat16(), torch.tensor(ENDS, dtype=torch.int32), dout.bfloat16()


@pytest.mark.parametrize("wgrad_with_hp", [False, True])
@pytest.mark.parametrize("mx", [False, True])
def test_products_of_folded_operands(mx: bool, wgrad_with_hp: bool) -> None:
    a, w, offs, dout = operands()
    lhs = (MXTensor.quantize(a) if mx else a).requires_grad_()
    w.requires_grad_()
    out = mxfp8_grouped_mm(lhs, w.mT, offs, wgrad_with_hp=wgrad_with_hp, compute="fold")
    da, dw = torch.autograd.grad(out, [lhs, w], MXTensor.quantize(dout) if mx else dout)

    w = w.detach()
    rows, columns = ops.quantize_row_fold(a), ops.quantize_row_fold(w, headroom=WEIGHT_HEADROOM)
    assert torch.equal(out, ops.grouped_mm_fold(*rows, *columns, offs))
    turned = ops.fold_rows(*ops.quantize_col(w), headroom=WEIGHT_HEADROOM)
    assert torch.equal(da, ops.grouped_mm_fold(*ops.quantize_row_fold(dout), *turned, offs))
    if mx:
        a, dout = (MXTensor.quantize(x).dequantize() for x in (a, dout))
    if wgrad_with_hp:
        assert torch.equal(dw, ops.grouped_wgrad_bf16(dout, a, offs))
    else:
        tokens = (ops.fold_groups(*ops.quantize_col(x), offs) for x in (dout, a))
        assert torch.equal(dw, ops.grouped_wgrad_fold(*(t for pair in tokens for t in pair), offs))


@pytest.mark.parametrize("shape", [(N,), (3, N)])
def test_a_bias_is_added_by_the_product(shape: tuple[int, ...]) -> None:
    a, w, offs, _ = operands()
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    with Kernels() as ran:
        out = mxfp8_grouped_mm(a, w.mT, offs, bias, compute="fold")
    assert ran.found == {"quantize_row_fold": 2, "grouped_mm_fold_bias": 1}
    rows, weights = ops.quantize_row_fold(a), ops.quantize_row_fold(w, headroom=WEIGHT_HEADROOM)
    per_group = bias.float().expand(3, N).contiguous()
    assert torch.equal(out, ops.grouped_mm_fold_bias(*rows, *weights, per_group, offs))


@pytest.mark.parametrize("wgrad_with_hp", [False, True])
def test_exact_products_on_hopper_multiply_dequantized_operands(
    wgrad_with_hp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, w, offs, dout = operands()
    a.requires_grad_()
    w.requires_grad_()
    monkeypatch.setattr(weights, "arch_of", lambda device: "sm_90")
    monkeypatch.delattr(direct, "grouped_mm_mx")
    monkeypatch.delattr(direct, "grouped_wgrad_mx")
    out = mxfp8_grouped_mm(a, w.mT, offs, wgrad_with_hp=wgrad_with_hp, compute="exact")
    da, dw = torch.autograd.grad(out, [a, w], dout)

    a, w = a.detach(), w.detach()
    rows, columns = (lambda x, f=f: ops.dequantize(*f(x)) for f in (ops.quantize_row, ops.quantize_col))
    assert torch.equal(out, ops.grouped_mm_bf16(rows(a), rows(w), offs))
    assert torch.equal(da, ops.grouped_mm_bf16(rows(dout), columns(w), offs))
    hp, mx = ops.grouped_wgrad_bf16, ops.grouped_wgrad_bf16_t
    assert torch.equal(dw, hp(dout, a, offs) if wgrad_with_hp else mx(columns(dout), columns(a), offs))


class Kernels(TorchDispatchMode):
    """How often each op of ours runs within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mxep":
            self.found[func._opname] += 1
        return func(*args, **(kwargs or {}))


UNPADDED = {"pad_token_groups_for_grouped_mm": False}
FORWARD = {"quantize_row_fold": 2, "grouped_mm_fold": 1}
BOTH_WAYS = {"quantize_both_fold": 1}
GRADIENT_OF_A = {"quantize_matrix_fold_t": 1, "grouped_mm_fold": 1}


@pytest.mark.parametrize(
    ("trained", "kernels"),
    [
        ("a", [FORWARD, GRADIENT_OF_A, {"quantize_row_fold": 1}]),
        ("w", [FORWARD, BOTH_WAYS, {"quantize_row_fold": -1, "quantize_col": 1, "fold_groups": 1,
                                    "grouped_wgrad_fold": 1}]),
        ("aw", [FORWARD, BOTH_WAYS, BOTH_WAYS, GRADIENT_OF_A, {"quantize_row_fold": -1, "grouped_wgrad_fold": 1}]),
    ],
)  # fmt: skip
def test_an_activation_is_read_once(trained: str, kernels: list[dict[str, int]]) -> None:
    """a, and dout where both gradients are asked for."""
    a, w, offs, dout = operands()
    leaves = [t.requires_grad_() for name, t in (("a", a), ("w", w)) if name in trained]
    with Kernels() as ran:
        torch.autograd.grad(mxfp8_grouped_mm(a, w.mT, offs, compute="fold", **UNPADDED), leaves, dout)
    want: Counter[str] = Counter()
    for part in kernels:
        want.update(part)
    assert ran.found == want


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients_groups_end_anywhere_and_tokens_are_not_folded(no_grad: Any) -> None:
    a, w, _, _ = operands()
    a, ends = a[:50].contiguous(), torch.tensor([7, 7, 50], dtype=torch.int32)
    want = mxfp8_grouped_mm(a, w.mT, ends, compute="fold")
    w.requires_grad_()
    with no_grad(), Kernels() as ran:
        assert torch.equal(mxfp8_grouped_mm(a, w.mT, ends, compute="fold"), want)
    assert ran.found == FORWARD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_saved_of_an_activation_is_its_codes_along_the_tokens(dtype: torch.dtype) -> None:
    a, w, offs, _ = operands()
    a = a.to(dtype)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mxfp8_grouped_mm(a, w.requires_grad_().mT, offs, compute="fold", **UNPADDED)
    assert [tuple(t.shape) for t in saved if t.dtype == torch.uint8] == [(K, M), (spans(M, len(ENDS)), K)]
    assert {t.data_ptr() for t in saved if t.dtype != torch.uint8} == {offs.data_ptr()}


def test_auto_folds_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    a, w, offs, _ = operands()
    exact, folded = (mxfp8_grouped_mm(a, w.mT, offs, compute=c) for c in ("exact", "fold"))
    assert not torch.equal(exact, folded)
    assert sqnr_db(folded, exact) > 50  # measured: 52.7, the rounding to bf16 of two sums that hardly differ
    assert torch.equal(mxfp8_grouped_mm(a, w.mT, offs), exact)
    monkeypatch.setattr(weights, "arch_of", lambda device: "sm_90")
    assert torch.equal(mxfp8_grouped_mm(a, w.mT, offs), folded)
    monkeypatch.setattr(weights, "arch_of", lambda device: "sm_100")
    assert torch.equal(mxfp8_grouped_mm(a, w.mT, offs), exact)
    assert torch.equal(mxfp8_grouped_mm(a, w.mT, offs, compute="fold"), folded)


@pytest.mark.parametrize(
    ("capability", "form"), [((8, 0), "mx"), ((8, 9), "mx"), ((9, 0), "fold"), ((10, 0), "mx"), ((12, 0), "mx")]
)
def test_the_form_on_a_gpu(capability: tuple[int, int], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "compute_capability", lambda device: capability)
    assert weights.format_of(Recipe.parse("mxfp8"), torch.device("cuda")).name == form
    assert weights.format_of(Recipe.parse("mxfp8", compute="exact"), torch.device("cuda")).name == "mx"
    assert weights.format_of(Recipe.parse("bf16"), torch.device("cuda")).name == "bf16"


def test_bad_compute() -> None:
    a, w, offs, _ = operands()
    with pytest.raises(ValueError, match="compute: got 'fast'; allowed: 'auto', 'exact', 'fold'"):
        mxfp8_grouped_mm(a, w.mT, offs, compute="fast")
