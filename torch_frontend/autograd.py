"""The grouped product and its gradient.

forward   x --quantize rows--> MX [--fold--] --grouped_mm(w along K) [+ bias]--> out
dgrad     dx <--grouped_mm(w along N)-- [--fold--] MX <--quantize rows-- dout      (or dout is MX already)
wgrad     dw <--grouped_wgrad-- dout, x     bf16 operands, or both re-quantized along the tokens [and folded]
dbias     sums of dout's rows, as a product with ones

Saved for the backward: x; or in its place, where the weight gradient folds it, its codes along the tokens, which the
forward's read of x made too: half of the memory of bf16.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from ..core_kernels.recipe import RECIPES, Compute, Form, Recipe
from ._call import require_tensor
from ._checks import check_devices, check_offs, check_rows, check_token_blocks, check_weights
from .products import (
    FLOATS,
    activation,
    bias_gradient,
    form_on,
    gradient_operands,
    input_gradient,
    is_mx,
    pad_to_blocks,
    product,
    tokens_of,
    weight_gradient,
)
from .weights import Folded


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b_t: Tensor,
        offs: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        form: Form,
        wgrad_with_hp: bool,
        pad: bool,
        tokens_follow: bool,
        rounding: int,
    ) -> Tensor:
        rows, tokens = activation(a, form, rounding, offs if tokens_follow else None)
        kept = (None, *tokens) if tokens else (a if ctx.needs_input_grad[1] else None, None, None)
        ctx.save_for_backward(*kept, b_t, offs)
        ctx.a_dtype = a.dtype
        ctx.form, ctx.pad, ctx.rounding = form, pad, rounding
        ctx.wgrad_mx = is_mx(form) and not wgrad_with_hp
        return product(rows, b_t.transpose(-2, -1), offs, out_dtype, form, rounding, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, qf_t, span_sf, b_t, offs = ctx.saved_tensors
        dout, w, form, rounding = grads[0], b_t.transpose(-2, -1), ctx.form, ctx.rounding
        need_da, need_dw = ctx.needs_input_grad[:2]
        rows, tokens, da, dw, dbias = dout, dout, None, None, None
        if ctx.wgrad_mx and need_da and need_dw and not ctx.pad:
            rows, tokens = gradient_operands(dout, form, rounding, offs)
        if need_da:
            da = input_gradient(rows, w, offs, ctx.a_dtype, form, rounding)
        if need_dw and ctx.wgrad_mx:
            row_map, ends = pad_to_blocks(offs, a.shape[0]) if ctx.pad else (None, offs)
            a = a if qf_t is None else Folded(qf_t, span_sf)
            tokens, a = (tokens_of(t, form, rounding, ends, row_map) for t in (tokens, a))
            dw = weight_gradient(tokens, a, ends, w.dtype)
        elif need_dw:
            dw = weight_gradient(dout, a, offs, w.dtype)
        if ctx.needs_input_grad[3]:
            dbias = bias_gradient(dout, offs)
        return da, None if dw is None else dw.transpose(-2, -1), None, dbias, *[None] * 6


# Dynamo would trace `backward` with a gradient of the output's type; here an MXTensor may arrive for a
# plain output. AOTAutograd, which runs the real engine, handles it: let Dynamo pass these calls on.
@torch.compiler.allow_in_graph
def _grouped_mm(*args: Any) -> Tensor:
    return cast(Tensor, _GroupedMM.apply(*args))


def mxfp8_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    wgrad_with_hp: bool = False,
    scale_calculation_mode: Rounding | str = Rounding.RCEIL,
    pad_token_groups_for_grouped_mm: bool = False,
    compute: Compute = "auto",
) -> Tensor:
    """Multiply each group of rows by its own matrix in MXFP8; differentiable in A, B_t and bias.

    A: (M, K) bfloat16 or float32, quantized here along K; or an MXTensor that already is.
    B_t: (G, K, N), the transpose of a contiguous (G, N, K), bfloat16 or float32; K, N multiples of 32.
    offs: (G,) int32, where each group of rows ends; rows past the last end give zeros.
    bias: (N,) for all groups or (G, N), one per group, bfloat16 or float32; None. It is added to the sums, before they
        are rounded to out_dtype.
    out_dtype: bfloat16 or float32. The gradient of A has A's dtype, that of B_t has B_t's.
    wgrad_with_hp: weight gradient from bf16 operands; False: from operands re-quantized along the
        tokens, which needs ends that are multiples of 32, or the padding below.
    scale_calculation_mode: a `Rounding` or its name.
    pad_token_groups_for_grouped_mm: pad groups to 32 rows where blocks run along the tokens, so that
        any counts are allowed. The forward and the input gradient never need it.
    compute: "exact", "fold" or "auto", see `Recipe`. B_t's quantized forms are kept for the next call while B_t does
        not change, see `keep_quantized_weights`.

    The gradient that arrives may be an MXTensor (from `unpermute_hp_fwd_mxfp8_bwd`). Raises
    ValueError (shapes, layout, ends) and TypeError (dtypes); the ends' values are checked for CPU
    tensors, and for CUDA within `debug_checks()`.

    >>> a, w = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(2, 64, 32, dtype=torch.bfloat16)
    >>> mxfp8_grouped_mm(a, w.mT, torch.tensor([1, 2], dtype=torch.int32))[:, 0].tolist()
    [32.0, 32.0, 0.0]
    """
    op = "mxfp8_grouped_mm"
    recipe = Recipe.parse(RECIPES["mxfp8"], rounding=Rounding.parse(scale_calculation_mode), compute=compute)
    _check_grouped_mm(op, A, B_t, offs, out_dtype)
    if bias is not None:
        bias = _checked_bias(op, bias, B_t)
    for name, flag in (
        ("wgrad_with_hp", wgrad_with_hp),
        ("pad_token_groups_for_grouped_mm", pad_token_groups_for_grouped_mm),
    ):
        if not isinstance(flag, bool):
            allowed = "allowed: bool (there is no kernel_preference here; see capabilities())"
            fail(TypeError, op, name, repr(flag), allowed)
    # Asked here: where gradients are off, `needs_input_grad` still says what would need one.
    has_wgrad = torch.is_grad_enabled() and B_t.requires_grad
    tokens_follow = has_wgrad and not wgrad_with_hp and not pad_token_groups_for_grouped_mm
    if tokens_follow:
        remedy = "pass wgrad_with_hp=True or pad_token_groups_for_grouped_mm=True"
        check_token_blocks(op, "A", A.shape[0], offs, remedy)
    form, pad = form_on(recipe, A.device), pad_token_groups_for_grouped_mm
    return _grouped_mm(A, B_t, offs, bias, out_dtype, form, wgrad_with_hp, pad, tokens_follow, int(recipe.rounding))


_to_mxfp8_then_scaled_grouped_mm = mxfp8_grouped_mm


def bf16_grouped_mm(A: Tensor, B_t: Tensor, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`mxfp8_grouped_mm` with bf16 operands: same arguments, same checks, nothing quantized."""
    _check_grouped_mm("bf16_grouped_mm", A, B_t, offs, out_dtype)
    return _grouped_mm(A, B_t, offs, None, out_dtype, "bf16", True, False, False, 0)


def fp8_rowwise_grouped_mm(A: Tensor, B_t: Tensor, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`mxfp8_grouped_mm` with E4M3 operands under one power of two per row instead of one per 32 values: same
    arguments, same checks. The weight gradient multiplies bf16."""
    _check_grouped_mm("fp8_rowwise_grouped_mm", A, B_t, offs, out_dtype)
    return _grouped_mm(A, B_t, offs, None, out_dtype, "row", True, False, False, int(Rounding.RCEIL))


def _check_grouped_mm(op: str, A: Tensor, B_t: Tensor, offs: Tensor, out_dtype: torch.dtype) -> None:
    check_rows(op, "A", A)
    check_weights(op, "B_t", B_t)
    if out_dtype not in FLOATS:
        fail(TypeError, op, "out_dtype", out_dtype, "allowed: torch.bfloat16 or torch.float32")
    groups, k, n = B_t.shape
    if A.shape[1] != k:
        fail(ValueError, op, "A", f"shape {tuple(A.shape)}", f"allowed: (M, {k}), the K of B_t (G, K, N)")
    for name, size in (("K", k), ("N", n)):
        if size % BLOCK:
            fail(ValueError, op, "B_t", f"{name} = {size}", f"allowed: multiples of {BLOCK}")
    if not B_t.transpose(-2, -1).is_contiguous():
        allowed = "allowed: the transpose of a contiguous (G, N, K): w.transpose(-2, -1)"
        fail(ValueError, op, "B_t", f"shape {tuple(B_t.shape)} with strides {B_t.stride()}", allowed)
    check_devices(op, "A", A.device, B_t=B_t)
    check_offs(op, offs, A, groups, "A", "B_t")


def _checked_bias(op: str, bias: Tensor, B_t: Tensor) -> Tensor:
    """(G, N) fp32."""
    groups, _, n = B_t.shape
    require_tensor(op, "bias", bias)
    if bias.dtype not in FLOATS:
        fail(TypeError, op, "bias", f"dtype {bias.dtype}", "allowed: bfloat16 or float32")
    if bias.shape not in ((n,), (groups, n)):
        fail(ValueError, op, "bias", f"shape {tuple(bias.shape)}", f"allowed: ({n},) or ({groups}, {n})")
    check_devices(op, "B_t", B_t.device, bias=bias)
    return bias.float().expand(groups, n)  # in this order, so that the gradient is rounded after all sums
