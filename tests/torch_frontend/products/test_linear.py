"""The functional dense layer: bytes of the grouped product of one group, launches, shared rows, compiled programs."""

import copy
import gc
from collections import Counter
from typing import Any

import pytest
import torch
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.torch_frontend import MXTensor, Recipe, grouped_mm, linear, quantize_weights
from mxep.torch_frontend.products.linear import SharedRows, checked_linear
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...compare import gemm_bound

K, N = 64, 96
FOLD = Recipe.parse("mxfp8", compute="fold")
RUNS = {**RECIPES, "mxfp8_folded": FOLD, "hp_folded": Recipe.parse("mxfp8_wgrad_with_hp", compute="fold")}
runs = pytest.mark.parametrize("run", RUNS)
FREE = {"view", "_unsafe_view", "detach", "t", "slice", "select", "unsqueeze", "empty", "new_empty", "_reshape_alias"}
"""Operations of torch that start no kernel."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(rows: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    x, w, bias = randn(rows, K, dtype=dtype), randn(N, K, seed=1, dtype=dtype), randn(N, seed=2, dtype=dtype)
    with torch.no_grad():  # a written leaf, as after an optimizer's step: both of its operands are of one read
        w.mul_(1)
    return x.requires_grad_(), w.requires_grad_(), bias.requires_grad_()


class Launched(TorchDispatchMode):
    """Names of the operations that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in FREE:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@runs
@pytest.mark.parametrize("rows", [0, 1, 32, 33, 300])
def test_one_group_of_the_grouped_product(run: str, rows: int) -> None:
    """The same bytes, however rows are padded for the weight gradient; the bias' gradient is a sum in another order."""
    x, w, bias = operands(rows)
    dout, leaves = randn(rows, N, seed=3), (x, w, bias)
    out = linear(x, w, bias, recipe=RUNS[run])
    want = grouped_mm(x, w[None], torch.tensor([rows]), bias=bias, recipe=RUNS[run])
    assert torch.equal(out, want)
    got = torch.autograd.grad(out, leaves, dout)
    for g, h in zip(got[:2], torch.autograd.grad(want, leaves, dout), strict=False):
        assert torch.equal(g, h)
    gemm_bound(got[2], dout.double().sum(0), dout.double().abs().sum(0), rows)


@runs
def test_strides_and_leading_dims_of_x_change_no_byte(run: str) -> None:
    x, w, bias = operands(66)
    wide = torch.zeros(66, K + 7, dtype=x.dtype)
    wide[:, 3:-4] = x.detach()
    dout = randn(66, N, seed=3)
    want = linear(x, w, bias, recipe=RUNS[run])
    want_grads = torch.autograd.grad(want, (x, w, bias), dout)
    for given, gradient in (
        (x.detach().view(2, 3, 11, K), dout.view(2, 3, 11, N)),
        (wide[:, 3:-4], dout.T.contiguous().T),
        (x.detach().T.contiguous().T, dout),
    ):
        leaf = given.requires_grad_()
        out = linear(leaf, w, bias, recipe=RUNS[run])
        assert out.shape == (*leaf.shape[:-1], N)
        assert torch.equal(out.reshape(-1, N), want)
        dx, *others = torch.autograd.grad(out, (leaf, w, bias), gradient)
        for g, h in zip((dx.reshape(-1, K), *others), want_grads, strict=True):
            assert torch.equal(g, h)


@runs
@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_an_input_without_a_gradient(run: str, rows: int, frozen: int) -> None:
    """It changes no byte of the others, and its gradient is not computed."""
    leaves = operands(rows)
    dout = randn(rows, N, seed=3)
    want = torch.autograd.grad(linear(*leaves, recipe=RUNS[run]), leaves, dout)
    given = [leaf.detach() if i == frozen else leaf for i, leaf in enumerate(leaves)]
    out = linear(*given, recipe=RUNS[run])
    with Launched() as launched:
        got = torch.autograd.grad(out, [leaf for i, leaf in enumerate(leaves) if i != frozen], dout)
    for g, h in zip(got, [w for i, w in enumerate(want) if i != frozen], strict=True):
        assert torch.equal(g, h)
    wgrads = sum(n for name, n in launched.found.items() if "wgrad" in name)
    products = sum(n for name, n in launched.found.items() if name.startswith("grouped_mm"))
    assert (products, wgrads, launched.found["sum"]) == (frozen != 0, frozen != 1, frozen != 2)


def test_the_launches_of_a_step() -> None:
    """The ops of the table at the top of products/linear.py."""
    x, w, _ = operands()
    with Launched() as forward:
        out = linear(x, w, recipe=FOLD)
    dout = torch.ones_like(out)
    with Launched() as backward:
        torch.autograd.grad(out, (x, w), dout)
    assert forward.found == Counter(full=1, quantize_both_fold=1, quantize_matrix_fold=1, grouped_mm_fold=1)
    assert backward.found == Counter(quantize_both_fold=1, grouped_mm_fold=1, grouped_wgrad_fold=1)


@pytest.mark.parametrize("grad", [True, False])
def test_rows_that_no_block_divides_are_copied_for_the_weight_gradient_alone(grad: bool) -> None:
    x, w, bias = operands(33)
    with Launched() as forward, torch.set_grad_enabled(grad):
        out = linear(x, w, bias, recipe=FOLD)
    assert forward.found["constant_pad_nd"] == grad
    assert forward.found["quantize_both_fold"] == grad
    assert out.shape == (33, N)
    dout = torch.ones_like(out)
    if grad:
        with Launched() as backward:
            torch.autograd.grad(out, (x, w, bias), dout)
        assert backward.found == Counter(
            sum=1, _to_copy=1, constant_pad_nd=1, quantize_both_fold=1, grouped_mm_fold=1, grouped_wgrad_fold=1
        )


@runs
def test_bias_is_rounded_once_and_in_one_launch(run: str) -> None:
    x, w, bias = operands()
    out = linear(x, w, bias, recipe=RUNS[run])
    wide = linear(x, w, bias, recipe=RUNS[run], out_dtype="float32")
    assert torch.equal(wide, linear(x, w, recipe=RUNS[run], out_dtype=torch.float32) + bias.float())
    assert torch.equal(out, wide.bfloat16())
    with Launched() as launched, torch.no_grad():
        linear(x, w, bias, recipe=RUNS[run])
    fused = launched.found["grouped_mm_fold_bias"]
    assert fused + launched.found["add"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_of_the_result(dtype: torch.dtype) -> None:
    x, w, bias = operands(dtype=dtype)
    assert linear(x, w, bias).dtype == dtype
    assert linear(x, w, bias, out_dtype="float32").dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, w, bias).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16), pytest.raises(TypeError, match=r"linear: torch\.autocast: got dtype"):
        linear(x, w, bias)
    out = linear(x, w, bias)
    assert all(g.dtype == dtype for g in torch.autograd.grad(out, (x, w, bias), torch.ones_like(out)))


@runs
@pytest.mark.parametrize("rows", [33, 64])
def test_quantized_weights_and_transposed_weights(run: str, rows: int) -> None:
    x, w, bias = operands(rows)
    out, dout = linear(x, w, bias, recipe=RUNS[run]), randn(rows, N, seed=3)
    want = (out, *torch.autograd.grad(out, (x, w, bias), dout))
    stored = w.detach().T.contiguous().requires_grad_()
    quantized = quantize_weights(w.detach()[None], RUNS[run]).with_values(w[None])
    for given, leaf in ((quantized, w), (stored.T, stored)):
        out = linear(x, given, bias, recipe=RUNS[run])
        got = [out, *torch.autograd.grad(out, (x, leaf, bias), dout)]
        got[2] = got[2] if leaf is w else got[2].T
        assert all(torch.equal(g, h) for g, h in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", [33, 64])
def test_a_gradient_of_mxfp8_bytes(rows: int) -> None:
    x, w, _ = operands(rows)
    dout = randn(rows, N, seed=3)
    for run in RUNS.values():
        given = MXTensor.quantize(dout)
        got = torch.autograd.grad(linear(x, w, recipe=run), (x, w), given)
        want = torch.autograd.grad(grouped_mm(x, w[None], torch.tensor([rows]), recipe=run), (x, w), given)
        assert all(torch.equal(g, h) for g, h in zip(got, want, strict=True))


# --- rows that several layers read ------------------------------------------------------------------------------------


def three(x: Tensor, weights: list[Tensor], shared: SharedRows | None, recipe: Recipe = FOLD) -> list[Tensor]:
    return [checked_linear("MXLinear", x, w, None, recipe, shared=shared) for w in weights]


@runs
@pytest.mark.parametrize("rows", [33, 64])
def test_layers_share_the_operands_of_their_rows(run: str, rows: int) -> None:
    x, weights = operands(rows)[0], [randn(N, K, seed=seed).requires_grad_() for seed in (4, 5, 6)]
    shared, dout = SharedRows(3), randn(rows, N, seed=3)
    results, launched = [], []
    for of in (None, shared):
        with Launched() as found:
            outs = three(x, weights, of, RUNS[run])
        results.append([*outs, *torch.autograd.grad(outs, [x, *weights], [dout] * 3)])
        launched.append(
            sum(n for name, n in found.found.items() if name.startswith("quantize") and "matrix" not in name)
        )
    assert all(torch.equal(g, h) for g, h in zip(*results, strict=True))
    if run == "mxfp8_folded":
        assert launched == [3 * (1 + 1), 1 + 3]  # the weights are unwritten leaves: a launch for each
    if run != "bf16":
        assert launched[0] - launched[1] == 2


def test_shared_rows_hold_nothing_after_the_last_layer() -> None:
    x, weights, shared = operands()[0], [randn(N, K, seed=seed) for seed in (4, 5, 6)], SharedRows(3)
    three(x, weights, shared)
    assert shared._kept is None
    three(x, weights[:2], shared)
    assert shared._kept is not None
    assert copy.deepcopy(shared)._kept is None
    del x
    gc.collect()
    assert shared._kept is None


def test_rows_that_were_written_or_are_others_are_quantized_again() -> None:
    w, shared = randn(N, K, seed=4), SharedRows(2)
    x = randn(64, K)
    for change in ("a write", "another tensor", "a layer with other needs"):
        checked_linear("MXLinear", x, w, None, FOLD, shared=shared)
        if change == "a write":
            x.mul_(2)
        elif change == "another tensor":
            x = randn(64, K, seed=9)
        weight = w.clone().requires_grad_() if change == "a layer with other needs" else w
        got = checked_linear("MXLinear", x, weight, None, FOLD, shared=shared)
        assert torch.equal(got, linear(x, weight, recipe=FOLD))
        shared = SharedRows(2)


def test_a_write_in_inference_mode_is_seen() -> None:
    """Its tensors have no version counter."""
    w, shared = randn(N, K, seed=4), SharedRows(2)
    with torch.inference_mode():
        x = randn(64, K) * 1.0
        checked_linear("MXLinear", x, w, None, FOLD, shared=shared)
        x.mul_(3)
        got = checked_linear("MXLinear", x, w, None, FOLD, shared=shared)
        assert torch.equal(got, linear(x, w, recipe=FOLD))
    assert shared._kept is None


# --- compiled programs ------------------------------------------------------------------------------------------------


@runs
@pytest.mark.parametrize("rows", [33, 64])
def test_one_graph_with_the_same_bytes(run: str, rows: int) -> None:
    torch._dynamo.reset()
    leaves, dout = operands(rows), randn(rows, N, seed=3)
    want = linear(*leaves, recipe=RUNS[run])
    got = torch.compile(lambda *of: linear(*of, recipe=RUNS[run]), fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(got, want)
    for g, h in zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout), strict=True):
        assert torch.equal(g, h)


def test_a_compiled_program_quantizes_rows_once_for_all_layers() -> None:
    """With the default backend, whose pass finds equal calls of an op."""
    torch._dynamo.reset()
    x, weights = operands()[0], [randn(N, K, seed=seed).requires_grad_() for seed in (4, 5, 6)]

    def run(x: Tensor) -> Tensor:
        return torch.cat(three(x, weights, None), 1)

    compiled = torch.compile(run, fullgraph=True)
    assert torch.equal(compiled(x), run(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = compiled(x)
    calls = Counter(event.name.removeprefix("mxep::") for event in profile.events())
    assert (calls["quantize_both_fold"], calls["grouped_mm_fold"]) == (1, 3)
    got, want = (torch.autograd.grad(of, weights, torch.ones_like(of)) for of in (out, run(x)))
    assert all(torch.equal(g, h) for g, h in zip(got, want, strict=True))


# --- bad input --------------------------------------------------------------------------------------------------------

X, W, B = (t.detach() for t in operands())
BAD = {
    "a width": (ValueError, r"linear: x: got shape \(64, 32\); allowed: \(\.\.\., 64\)", (X[:, :32], W), {}),
    "no dims": (ValueError, r"linear: x: got shape \(\)", (X[0, 0], W), {}),
    "half": (TypeError, r"linear: x: got dtype torch.float16", (X.half(), W), {}),
    "half weights": (TypeError, r"linear: w: got dtype torch.float16", (X, W.half()), {}),
    "MX rows": (TypeError, r"linear: x: got an MXTensor", (MXTensor.quantize(X), W), {}),
    "MX weights": (ValueError, r"linear: w: got an MXTensor that", (X, MXTensor.quantize(W).requires_grad_()), {}),
    "groups": (ValueError, r"linear: w: got shape \(1, 96, 64\)", (X, W[None]), {}),
    "many groups": (ValueError, r"QuantizedWeights of 2 groups", (X, quantize_weights(torch.stack([W, W]))), {}),
    "another recipe": (ValueError, r"QuantizedWeights of form 'mx'", (X, quantize_weights(W[None])), {"recipe": FOLD}),
    "K": (ValueError, r"linear: w: got K = 40; allowed: positive multiples of 32", (X[:, :40], W[:, :40]), {}),
    "N": (ValueError, r"linear: w: got N = 40; allowed: positive multiples of 32", (X, W[:40]), {}),
    "strides": (ValueError, r"linear: w: got strides \(128, 2\)", (X, torch.empty(N, 2 * K)[:, ::2]), {}),
    "bias": (ValueError, r"linear: bias: got shape \(64,\); allowed: \(96,\)", (X, W, B[:64]), {}),
    "half bias": (TypeError, r"linear: bias: got dtype torch.float16", (X, W, B.half()), {}),
    "elsewhere": (ValueError, r"linear: x: got device meta; allowed: cpu, where w", (X.to("meta"), W), {}),
    "bias elsewhere": (ValueError, r"linear: bias: got device meta; allowed: cpu", (X, W, B.to("meta")), {}),
    "out dtype": (TypeError, r"linear: out_dtype: got torch.float16", (X, W), {"out_dtype": torch.float16}),
    "recipe": (ValueError, r"recipe: got 'fp4'", (X, W), {"recipe": "fp4"}),
    "a list": (TypeError, r"linear: x: got a list", ([1.0], W), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    error, message, args, options = BAD[name]
    with pytest.raises(error, match=message):
        linear(*args, **options)


def test_a_second_derivative_raises() -> None:
    leaves = operands()
    with pytest.raises(NotImplementedError, match="linear: backward: got create_graph=True"):
        torch.autograd.grad(linear(*leaves).sum(), leaves, create_graph=True)
