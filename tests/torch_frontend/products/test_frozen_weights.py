"""Frozen weights: bytes along K alone, whose input gradient is the gradient of the dequantized weights."""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from mxep.torch_frontend import (
    MXTensor,
    Recipe,
    grouped_mm,
    grouped_swiglu_ffn,
    linear,
    ops,
    quantize_weights,
)
from torch import Tensor

from ...compare import sqnr_db

G, F, D = 2, 96, 64
ENDS = torch.tensor([40, 100], dtype=torch.int32)
"""No multiples of 32: without a weight gradient no group is padded."""
RECIPES = {
    "mxfp8": Recipe.parse("mxfp8"),
    "fold": Recipe.parse("mxfp8", compute="fold"),
    "floor": Recipe.parse("mxfp8_wgrad_with_hp", rounding="floor"),
    "bf16": Recipe.parse("bf16"),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X = randn(100, D, seed=0)
Weights = Sequence[Tensor]


def one_product(x: Tensor, weights: Weights, recipe: Recipe) -> Tensor:
    return grouped_mm(x, weights[0], ENDS, recipe=recipe, pad_token_groups=False)


def feed_forward(x: Tensor, weights: Weights, recipe: Recipe) -> Tensor:
    w1, w3, w2 = weights
    return grouped_swiglu_ffn(x, w1, w3, w2, ENDS, recipe=recipe, pad_token_groups=False)


def dense(x: Tensor, weights: Weights, recipe: Recipe) -> Tensor:
    w = weights[0]
    return linear(x, w[0] if type(w) is Tensor else w, recipe=recipe)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "grouped_mm": (one_product, [randn(G, F, D, seed=1)]),
    "grouped_swiglu_ffn": (
        feed_forward,
        [randn(G, *shape, seed=i, dtype=torch.float32) for i, shape in enumerate([(F, D), (F, D), (D, F)])],
    ),
    "linear": (dense, [randn(1, F, D, seed=2)]),
}
products = pytest.mark.parametrize("name", PRODUCTS)


def frozen(weights: Weights, recipe: Recipe) -> list[Tensor]:
    return [quantize_weights(w, recipe if recipe.mx else "mxfp8", frozen=True) for w in weights]


def step(run: Callable[..., Tensor], weights: Weights, recipe: Recipe) -> list[Tensor]:
    """Output and input gradient."""
    x = X.clone().requires_grad_()
    out = run(x, weights, recipe)
    return [out.detach(), torch.autograd.grad(out, x, randn(*out.shape, seed=9))[0]]


@recipes
@products
def test_the_forward_is_of_the_weights_and_the_gradient_of_their_bytes(name: str, recipe: Recipe) -> None:
    run, weights = PRODUCTS[name]
    held = frozen(weights, recipe)
    out, dx = step(run, held, recipe)
    values = [w.dequantize() for w in held]
    assert torch.equal(out, step(run, weights if recipe.mx else values, recipe)[0])
    assert torch.equal(dx, step(run, values, recipe)[1])
    if recipe.mx:  # with bytes along both dims, as `quantize_weights` of the values makes them
        both = [quantize_weights(v, recipe) for v in values]
        assert torch.equal(dx, step(run, both, recipe)[1])


def test_a_dense_layer_takes_the_bytes_of_one_group() -> None:
    w = PRODUCTS["linear"][1][0]
    for held in (quantize_weights(w, frozen=True), MXTensor.quantize(w[0])):
        assert torch.equal(linear(X, held), linear(X, w[0]))


@pytest.mark.parametrize("compute", ["exact", "fold"])
def test_a_forward_quantizes_no_weight_and_a_backward_does(compute: Any, quantized: list[str]) -> None:
    recipe = Recipe.parse("mxfp8", compute=compute)
    run, weights = PRODUCTS["grouped_mm"]
    held, x = frozen(weights, recipe), X.clone().requires_grad_()
    quantized.clear()
    out = run(x, held, recipe)
    assert quantized == []
    out.sum().backward()
    assert quantized == ["dequantize", {"exact": "quantize_col", "fold": "quantize_matrix_fold_t"}[compute]]


@products
def test_bytes_are_all_that_lives(name: str) -> None:
    """1.03 per weight, and nothing refers to the weights. A backward saves no values of weights and, without a weight
    gradient, no x."""
    run, weights = PRODUCTS[name]
    weights = [w.clone() for w in weights]
    alive = [weakref.ref(w) for w in weights]
    numel = sum(w.numel() for w in weights)
    held = frozen(weights, RECIPES["mxfp8"])
    del weights
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    assert sum(w.q.nbytes + w.sf.nbytes for w in held) == numel * 33 / 32  # type: ignore[attr-defined]
    saved: list[Tensor] = []
    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(x, held, RECIPES["mxfp8"])
    bytes_of_weights = {w.q.data_ptr() for w in held}  # type: ignore[attr-defined]
    assert {t.q.data_ptr() for t in saved if isinstance(t, MXTensor)} == bytes_of_weights
    others = [t for t in saved if not isinstance(t, MXTensor)]
    assert all(t.dim() < 3 for t in others)
    assert all(t.data_ptr() != x.data_ptr() for t in others)


def test_what_one_plane_costs_in_db() -> None:
    """Of the input gradient against the exact one, of weights whose channels have different sizes. Measured: 28.45 dB
    with bytes along both dims and with bytes along K, 31.50 dB against the gradient of the frozen weights' forward. A
    scale is a power of two: a value of E4M3 in another block is a value of E4M3, unless it becomes subnormal."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    w = (normal(1, 512, 384) * normal(1, 1, 384).mul(0.5).exp() * normal(1, 512, 1).mul(0.3).exp() * 0.02).bfloat16()
    dout, ends = normal(256, 512).bfloat16(), torch.tensor([256])
    held = quantize_weights(w, frozen=True)
    exact, of_frozen = (dout.double() @ v[0].double() for v in (w, held.dequantize()))
    for compute in ("exact", "fold"):
        recipe = Recipe.parse("mxfp8", compute=compute)
        found = []
        for weights in (w, held):
            x = torch.zeros(256, 384, dtype=torch.bfloat16, requires_grad=True)
            found.append(torch.autograd.grad(grouped_mm(x, weights, ends, recipe=recipe), x, dout)[0])
        two, one = (sqnr_db(dx, exact) for dx in found)
        assert 28.3 < two < 28.6
        assert abs(one - two) < 0.02
        assert 31.3 < sqnr_db(found[1], of_frozen) < 31.7


def test_compiled() -> None:
    torch._dynamo.reset()
    run, weights = PRODUCTS["grouped_swiglu_ffn"]
    held = frozen(weights, RECIPES["mxfp8"])

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return run(x, weights, RECIPES["mxfp8"])

    x, again = (X.clone().requires_grad_() for _ in range(2))
    got, want = torch.compile(call, fullgraph=True, backend="aot_eager")(x, *held), call(again, *held)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(out.sum(), of)[0] for out, of in ((got, x), (want, again))))


TRAINED = MXTensor.quantize(PRODUCTS["grouped_mm"][1][0]).requires_grad_()
HELD = MXTensor.quantize(PRODUCTS["grouped_mm"][1][0])
ONE = MXTensor(HELD.q[0], HELD.sf[0])


@pytest.mark.parametrize(
    ("error", "words", "run"),
    [
        (ValueError, "grouped_mm: w: got an MXTensor that requires a gradient; allowed: requires_grad=False",
         lambda: grouped_mm(X, TRAINED, ENDS)),
        (ValueError, "linear: w: got an MXTensor that requires", lambda: linear(X, ONE.detach().requires_grad_())),
        (ValueError, "w1: got an MXTensor that requires", lambda: grouped_swiglu_ffn(X, TRAINED, HELD, HELD, ENDS)),
        (ValueError, "w: got an MXTensor for form 'row'; allowed: with recipe 'mxfp8',",
         lambda: grouped_mm(X, HELD, ENDS, recipe="fp8_rowwise")),
        (ValueError, "w: got an MXTensor for form 'block'", lambda: linear(X, ONE, recipe="fp8_blockwise")),
        (ValueError, r"grouped_mm: w: got shape \(96, 64\); allowed: 3 dims", lambda: grouped_mm(X, ONE, ENDS)),
        (ValueError, r"linear: w: got shape \(2, 96, 64\)", lambda: linear(X, HELD)),
        (ValueError, "quantize_weights: recipe: got 'bf16' with frozen=True; allowed: one with operands 'mxfp8'",
         lambda: quantize_weights(randn(2, 32, 32, seed=0), "bf16", frozen=True)),
        (TypeError, "frozen: got 1; allowed: bool", lambda: quantize_weights(randn(2, 32, 32, seed=0), frozen=1)),  # type: ignore[call-overload]
        (TypeError, "w: got an MXTensor; allowed: bfloat16 or float32 weights", lambda: quantize_weights(HELD)),
    ],
)  # fmt: skip
def test_errors(error: type[Exception], words: str, run: Callable[[], object]) -> None:
    with pytest.raises(error, match=words):
        run()


def test_the_bytes_along_n_follow_the_recipe_rounding() -> None:
    """RCEIL bytes along K, FLOOR along N: the recipe of the call quantizes what the call quantizes."""
    held, floor = HELD, Recipe.parse("mxfp8", rounding="floor")
    x = X.clone().requires_grad_()
    dout = randn(100, F, seed=9)
    dx = torch.autograd.grad(grouped_mm(x, held, ENDS, recipe=floor, pad_token_groups=False), x, dout)[0]
    rows = ops.quantize_row(dout, rounding=1)
    columns = ops.quantize_col(held.dequantize(), rounding=1)
    assert torch.equal(dx, ops.grouped_mm_mx(*rows, *columns, ENDS, "bfloat16", True))
