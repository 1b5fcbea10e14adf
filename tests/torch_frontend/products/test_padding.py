"""Rows past the last group end never show: not in real rows, and not in public results, which are zeros there.

Twice the same call: with zeros in the padding and in the memory of outputs, and with bytes of 0xFF, which are NaN as
bf16, fp32, E4M3 and E8M0. tests/gpu/layer/test_padding.py runs it on a GPU.
"""

from typing import Any

import pytest
import torch
from mxep.torch_frontend import MoE, Recipe, RouterConfig, SwiGLU, grouped_mm, grouped_swiglu_ffn, ops
from mxep.torch_frontend.ops import call
from mxep.torch_frontend.ops.launch import Outputs
from mxep.torch_frontend.overlap.local_experts import FFN
from mxep.torch_frontend.products.ffn import Biases, FFNOptions
from mxep.torch_frontend.products.gathered_rows import gathered_rows
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, ENDS, DIM, HIDDEN = 640, (32, 32, 352), 128, 64
END = ENDS[-1]
RECIPES = {
    "mxfp8": Recipe.parse("mxfp8"),
    "mxfp8_fold": Recipe("mxfp8", compute="fold"),
    "mxfp8_exact": Recipe("mxfp8", compute="exact"),
    **{name: Recipe.parse(name) for name in ("mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise", "bf16")},
    "fp8_blockwise_wgrad_with_hp": Recipe.parse("fp8_blockwise", wgrad_with_hp=True),
}
Named = dict[str, Tensor]


def fill(x: Tensor, byte: int) -> None:
    """Write a byte to all of the memory of x."""
    if x.numel():
        x.view(torch.uint8).fill_(byte)


def filled_memory(byte: int, patch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch memory of ops have the byte before a kernel writes them."""
    allocate = call.allocate

    def filled(outputs: Outputs, index: int | None) -> tuple[Tensor, ...]:
        found = allocate(outputs, index)
        for x in found:
            fill(x, byte)
        return found

    patch.setattr(call, "allocate", filled)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def padded(x: Tensor, byte: int) -> Tensor:
    fill(x[END:], byte)
    return x


def rows(seed: int, kind: str, byte: int) -> Tensor:
    """(ROWS, DIM): "bf16", or "gathered", MXFP8 rows through a map."""
    x = padded(randn(seed, ROWS, DIM).bfloat16(), byte)
    if kind == "bf16":
        return x
    packed = ops.quantize_row_packed(x[:END].contiguous())
    packed = torch.cat([packed, torch.full_like(packed[:1], byte)])
    row_map = torch.randperm(END, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.int32)
    row_map[3::32] = -1  # padding within groups
    return gathered_rows(packed, torch.cat([row_map, row_map.new_full((ROWS - END,), END)]), torch.bfloat16)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [(randn(10 + i, *shape) / shape[-1] ** 0.5).bfloat16().requires_grad_() for i, shape in enumerate(shapes)]


def ffn(recipe: Recipe, kind: str, biased: bool, byte: int, clear_rest: bool) -> Named:
    """The result and all gradients of the experts of a layer, or of `grouped_swiglu_ffn`."""
    groups = len(ENDS)
    experts = dict(
        zip(
            ("w1", "w3", "w2"),
            weights((groups, HIDDEN, DIM), (groups, HIDDEN, DIM), (groups, DIM, HIDDEN)),
            strict=True,
        )
    )
    biases = dict(zip(("b1", "b3", "b2"), weights((groups, HIDDEN), (groups, HIDDEN), (groups, DIM)), strict=True))
    biases = biases if biased else {}
    x = rows(0, kind, byte).requires_grad_()
    prob = padded(randn(1, ROWS).abs(), byte).requires_grad_()
    ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    activation = SwiGLU(limit=1.0)
    leaves = {"x": x, "prob": prob, **experts, **biases}
    b1, b3, b2 = (biases.get(name) for name in ("b1", "b3", "b2"))
    if clear_rest:
        out = grouped_swiglu_ffn(
            x, *experts.values(), ends, prob, biases=(b1, b3, b2), activation=activation, recipe=recipe,
            pad_token_groups=False,
        )  # fmt: skip
    else:
        options = FFNOptions(recipe, activation, clear_rest=False)
        out = FFN("test", tuple(experts.values()), Biases(b1, b3, b2), options).multiply(x, ends, prob)
    gradient_kind = "bf16" if biased else kind  # biases sum the rows of a gradient in bf16
    grads = torch.autograd.grad(out, tuple(leaves.values()), rows(2, gradient_kind, byte))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def real_rows(found: Named) -> Named:
    return {name: x[:END] if x.shape[0] == ROWS else x for name, x in found.items()}


def same_bits(got: Named, want: Named) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert torch.isfinite(x).all(), name
        assert torch.equal(x.contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8)), name


def twice(patch: pytest.MonkeyPatch, run: Any) -> tuple[Any, Any]:
    """The results with zeros and with poison."""
    found = []
    for byte in (0x00, 0xFF):
        with patch.context() as patched:
            filled_memory(byte, patched)
            found.append(run(byte))
    return found[0], found[1]


@pytest.mark.filterwarnings("ignore:.*the last end is")
@pytest.mark.parametrize("biased", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("kind", ["bf16", "gathered"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_feed_forward(recipe: str, kind: str, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    want, layer = twice(monkeypatch, lambda byte: ffn(RECIPES[recipe], kind, biased, byte, clear_rest=False))
    same_bits(real_rows(layer), real_rows(want))
    _, public = twice(monkeypatch, lambda byte: ffn(RECIPES[recipe], kind, biased, byte, clear_rest=True))
    same_bits(real_rows(public), real_rows(want))
    for name in ("out", "x", "prob"):
        assert not public[name][END:].any(), name


@pytest.mark.filterwarnings("ignore:.*the last end is")
@pytest.mark.parametrize("kind", ["bf16", "gathered"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_product(recipe: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(byte: int) -> Named:
        (w,) = weights((len(ENDS), HIDDEN, DIM))
        x = rows(0, kind, byte).requires_grad_()
        ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
        out = grouped_mm(x, w, ends, recipe=RECIPES[recipe], pad_token_groups=False)
        dout = padded(randn(2, ROWS, HIDDEN).bfloat16(), byte)
        dx, dw = torch.autograd.grad(out, (x, w), dout)
        return {"out": out.detach(), "x": dx, "w": dw}

    want, got = twice(monkeypatch, run)
    same_bits(real_rows(got), real_rows(want))
    assert not got["out"][END:].any()
    assert not got["x"][END:].any()


@pytest.mark.parametrize("prob_in", ["combine", "swiglu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer(recipe: str, prob_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups have padding within groups and past the last one."""

    def run(byte: int) -> Named:
        torch.manual_seed(0)
        router, options = RouterConfig(top_k=2, prob_in=prob_in), {"dtype": torch.bfloat16, "device": DEVICE}
        moe = MoE(64, 96, 4, router, recipe=RECIPES[recipe], **options)
        x = randn(0, 48, 64).bfloat16().requires_grad_()
        y, _ = moe(x)
        leaves = {"x": x, **dict(moe.named_parameters())}
        grads = torch.autograd.grad(y, tuple(leaves.values()), randn(1, 48, 64).bfloat16())
        return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}

    want, got = twice(monkeypatch, run)
    same_bits(got, want)
