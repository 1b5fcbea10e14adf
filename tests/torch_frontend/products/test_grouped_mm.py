"""The differentiable grouped product against plain matmuls of the values it multiplies."""

import pytest
import torch
from mxep.core_kernels.policy.recipe import Compute
from mxep.torch_frontend import MXTensor, Recipe, grouped_mm, ops
from mxep.torch_frontend.integrations.torchao import mxfp8_grouped_mm
from torch import Tensor

from ...compare import product_bound, same_bytes

K, N, ENDS = 64, 96, (32, 32, 96)  # the second group is empty; rows 96.. belong to nobody
GROUPS = [(g, slice(start, end)) for g, (start, end) in enumerate(zip((0, *ENDS), ENDS, strict=False))]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(rows: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    a, w = randn(rows, K, dtype=dtype), randn(len(ENDS), N, K, seed=1, dtype=dtype)
    return a.requires_grad_(), w.requires_grad_(), torch.tensor(ENDS, dtype=torch.int32)


def rowwise(x: Tensor, rounding: int = 0) -> Tensor:
    """The values of x quantized along its last dim."""
    return ops.dequantize(*ops.quantize_row(x.contiguous(), rounding), "float32")


def colwise(x: Tensor) -> Tensor:
    """The values of x (..., M, N) quantized along M, as (..., M, N)."""
    return ops.dequantize(*ops.quantize_col(x.contiguous()), "float32").mT


def test_any_counts_with_padding() -> None:
    a, w, _ = operands(rows=50)
    offs = torch.tensor([7, 7, 50], dtype=torch.int32)
    dout = randn(50, N, seed=2)
    padded = mxfp8_grouped_mm(a, w.mT, offs)
    da, dw = torch.autograd.grad(padded, [a, w], dout)
    unpadded = mxfp8_grouped_mm(a, w.mT, offs, wgrad_with_hp=True)
    assert torch.equal(padded, unpadded)
    assert torch.equal(da, torch.autograd.grad(unpadded, a, dout)[0])
    for g, rows in ((0, slice(0, 7)), (2, slice(7, 50))):
        pad = (0, 0, 0, -(rows.stop - rows.start) % 32)
        left, right = (colwise(torch.nn.functional.pad(x[rows], pad)) for x in (dout, a.detach()))
        product_bound(dw[g], left.T, right)
    assert (dw[1] == 0).all()


@pytest.mark.parametrize("mx_grad", [True, False])
@pytest.mark.parametrize("per_group", [True, False])
@pytest.mark.parametrize("compute", ["exact", "fold"])
def test_bias(compute: Compute, per_group: bool, mx_grad: bool) -> None:
    """Added once in fp32, to the rows of groups alone; its gradient is theirs, whatever form dout comes in."""
    a, w, offs = operands()
    bias = randn(*((3, N) if per_group else (N,)), seed=3, dtype=torch.float32).requires_grad_()
    exact = mxfp8_grouped_mm(a, w.mT, offs, out_dtype=torch.float32, wgrad_with_hp=True, compute=compute)
    out = mxfp8_grouped_mm(a, w.mT, offs, bias, out_dtype=torch.float32, wgrad_with_hp=True, compute=compute)
    dout = randn(128, N, seed=2).float()
    values = rowwise(dout) if mx_grad else dout
    (dbias,) = torch.autograd.grad(out, bias, MXTensor.quantize(dout) if mx_grad else dout)
    sums, magnitudes = (torch.stack([x[rows].double().sum(0) for _, rows in GROUPS]) for x in (values, values.abs()))
    if not per_group:
        sums, magnitudes = sums.sum(0), magnitudes.sum(0)
    # A product with ones: fp32 sums of M terms, of which two bf16 parts leave out 2^-17.
    assert ((dbias - sums).abs() <= (2.0**-17 + len(dout) * 2.0**-23) * magnitudes).all()
    for g, rows in GROUPS:
        assert torch.equal(out[rows], exact[rows] + (bias[g] if per_group else bias))
    assert (out[ENDS[-1] :] == 0).all()


@pytest.mark.parametrize("compute", ["exact", "fold"])
def test_a_bias_changes_no_other_gradient_and_bf16_is_rounded_once(compute: Compute) -> None:
    a, w, offs = operands()
    bias = randn(3, N, seed=3).requires_grad_()
    dout = randn(128, N, seed=2)
    out = mxfp8_grouped_mm(a, w.mT, offs, bias, compute=compute)
    assert torch.equal(out, mxfp8_grouped_mm(a, w.mT, offs, bias, torch.float32, compute=compute).bfloat16())
    da, dw, dbias = torch.autograd.grad(out, [a, w, bias], dout)
    assert dbias.dtype == bias.dtype
    without = mxfp8_grouped_mm(a, w.mT, offs, compute=compute)
    for got, want in zip((da, dw), torch.autograd.grad(without, [a, w], dout), strict=True):
        assert torch.equal(got, want)
    alone = mxfp8_grouped_mm(a.detach(), w.detach().mT, offs, bias, compute=compute)
    assert torch.equal(torch.autograd.grad(alone, bias, dout)[0], dbias)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8 folded", "fp8_rowwise", "fp8_blockwise", "bf16"])
def test_torchs_default_device_changes_no_product(recipe: str) -> None:
    a, w, offs = operands()
    chosen = Recipe.parse("mxfp8", compute="fold") if recipe == "mxfp8 folded" else recipe
    dout = randn(128, N, seed=2)
    want = torch.autograd.grad(grouped_mm(a, w, offs, recipe=chosen), [a, w], dout)
    with torch.device("meta"):  # as "cuda" in a process that computes on a CPU
        got = torch.autograd.grad(grouped_mm(a, w, offs, recipe=chosen), [a, w], dout)
    same_bytes(got, want)


def test_autocast_changes_no_product() -> None:
    a, w, offs = operands()
    big = (a.detach() * 2**14).float()
    want = mxfp8_grouped_mm(big, w.mT, offs, out_dtype=torch.float32, wgrad_with_hp=True)
    with torch.autocast("cpu", torch.float16):
        got = mxfp8_grouped_mm(big, w.mT, offs, out_dtype=torch.float32, wgrad_with_hp=True)
    assert torch.equal(got, want)


def test_unaligned_groups_raise_under_compile_too() -> None:
    a, w, _ = operands(96)
    offs = torch.tensor([30, 64, 96], dtype=torch.int32)

    def loss(a: Tensor) -> Tensor:
        return mxfp8_grouped_mm(a, w.mT, offs, pad_token_groups_for_grouped_mm=False).float().sum()

    with pytest.raises(ValueError, match="multiples of 32"):
        loss(a)
    with pytest.raises(ValueError, match="multiples of 32"):
        torch.compile(loss, backend="aot_eager")(a).backward()


RECIPES = ["bf16", "fp8_rowwise", "mxfp8", "mxfp8_wgrad_with_hp", Recipe("folded", compute="fold", wgrad_with_hp=False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r if isinstance(r, str) else r.name)
def test_transposed_weights_give_the_same_bytes(recipe: Recipe | str, dtype: torch.dtype) -> None:
    """w stored (G, K, N): its gradient has the layout of the leaf, and an updated leaf is quantized in the forward."""
    x, w, ends = operands(dtype=dtype)
    stored = w.detach().mT.contiguous().requires_grad_()
    dout, bias = randn(128, N, seed=3), randn(len(ENDS), N, seed=4)
    for _ in range(2):
        results = []
        for weight, leaf in ((w, w), (stored.mT, stored)):
            out = grouped_mm(x, weight, ends, recipe=recipe, bias=bias)
            dx, dw = torch.autograd.grad(out, [x, leaf], dout)
            assert dw.is_contiguous()
            results.append((out, dx, dw if leaf is w else dw.mT))
        same_bytes(*results)
        with torch.no_grad():  # a written leaf: both operands are quantized in the forward
            w.mul_(2)
            stored.mul_(2)


def test_float32_parameters_get_float32_gradients() -> None:
    a, w, offs = operands(dtype=torch.float32)
    for wgrad_with_hp in (True, False):
        out = mxfp8_grouped_mm(a, w.mT, offs, out_dtype=torch.float32, wgrad_with_hp=wgrad_with_hp)
        da, dw = torch.autograd.grad(out, [a, w], torch.ones_like(out))
        assert da.dtype == dw.dtype == torch.float32


@pytest.mark.parametrize(
    ("compute", "mx_input", "wgrad_with_hp", "backend"),
    [("exact", True, True, "inductor"), ("fold", False, False, "aot_eager")],
)
def test_whole_graph_forward_and_backward(compute: Compute, mx_input: bool, wgrad_with_hp: bool, backend: str) -> None:
    torch._dynamo.reset()

    def run(a: Tensor, w: Tensor, offs: Tensor, bias: Tensor) -> Tensor:
        rows = MXTensor.quantize(a) if mx_input else a
        return mxfp8_grouped_mm(rows, w.mT, offs, bias, wgrad_with_hp=wgrad_with_hp, compute=compute)

    a, w, offs = operands()
    dout, bias = randn(128, N, seed=2), randn(N, seed=3).requires_grad_()
    leaves = [a, w, bias]
    want = run(a, w, offs, bias)
    got = torch.compile(run, fullgraph=True, backend=backend)(a, w, offs, bias)
    assert torch.equal(got, want)
    for g, h in zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout), strict=True):
        assert torch.equal(g, h)


def test_a_graph_cut_before_an_mx_gradient_still_gets_it() -> None:
    torch._dynamo.reset()
    a, w, offs = operands()
    out = torch.compile(lambda a, w: mxfp8_grouped_mm(a, w.mT, offs, wgrad_with_hp=True), fullgraph=True,
                        backend="aot_eager")(a, w)  # fmt: skip
    grad = MXTensor.quantize(randn(128, N, seed=2))
    want = mxfp8_grouped_mm(a, w.mT, offs, wgrad_with_hp=True)
    for g, h in zip(torch.autograd.grad(out, [a, w], grad), torch.autograd.grad(want, [a, w], grad), strict=True):
        assert torch.equal(g, h)


A, W, OFFS = (x.detach() for x in operands())
TRAINED = W.clone().requires_grad_()


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


UNPADDED = {"pad_token_groups_for_grouped_mm": False}
BAD = {
    "contiguous B_t": (ValueError, r"B_t: .*w.transpose\(-2, -1\)", (A, W.mT.contiguous(), OFFS), {}),
    "MX weights": (TypeError, r"B_t: got an MXTensor", (A, MXTensor.quantize(W), OFFS), {}),
    "decreasing": (ValueError, r"offs: got \[32, 0, 96\]", (A, W.mT, ends(32, 0, 96)), {}),
    "past M": (ValueError, r"offs: got \[32, 32, 160\]; .* up to 128", (A, W.mT, ends(32, 32, 160)), {}),
    "unaligned": (ValueError, r"offs: .*multiples of 32; pass pad_token", (A, TRAINED.mT, ends(1, 2, 3)), UNPADDED),
    "unaligned M": (ValueError, r"A: got M = 100; .*pad_token_groups", (A[:100], TRAINED.mT, OFFS), UNPADDED),
    "offs elsewhere": (ValueError, r"offs: got device meta; allowed: cpu", (A, W.mT, OFFS.to("meta")), {}),
    "out dtype": (TypeError, r"out_dtype: got torch.float16", (A, W.mT, OFFS), {"out_dtype": torch.float16}),
    "bias elsewhere": (ValueError, r"bias: got device meta; ", (A, W.mT, OFFS, torch.ones(N).to("meta")), {}),
    "rounding": (ValueError, r"scale_calculation_mode: got 'up'", (A, W.mT, OFFS), {"scale_calculation_mode": "up"}),
    "a preference": (TypeError, r"wgrad_with_hp: got 'auto'", (A, W.mT, OFFS), {"wgrad_with_hp": "auto"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    error, message, args, options = BAD[name]
    with pytest.raises(error, match=message):
        mxfp8_grouped_mm(*args, **options)
