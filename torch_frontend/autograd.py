"""The grouped product and its gradient.

forward   x --quantize rows--> MX [--fold--] --grouped_mm(w along K) [+ bias]--> out
dgrad     dx <--grouped_mm(w along N)-- [--fold--] MX <--quantize rows-- dout      (or dout is MX already)
wgrad     dw <--grouped_wgrad-- dout, x     bf16 operands, or both re-quantized along the tokens [and folded]
dbias     sums of dout's rows, as a product with ones

Saved for the backward: x; or in its place, where the weight gradient folds it, its codes along the tokens, which the
forward's read of x made too: half of the memory of bf16.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from ..core_kernels.recipe import RECIPES, Compute, Form, Recipe
from ._call import FLOATS, require_tensor
from ._checks import (
    check_devices,
    check_flag,
    check_offs,
    check_out_dtype,
    check_rows,
    check_token_blocks,
    recipe_compute,
)
from ._differentiable import differentiable, save, saved_by
from .products import (
    activation,
    bias_gradient,
    form_on,
    gradient_operands,
    is_mx,
    pad_to_blocks,
    product,
    rows_of,
    tokens_of,
    weight_gradient,
)
from .weights import Held, QuantizedWeights, Weights, along_n, check_float_weights, check_held, for_call, stays


class How(NamedTuple):
    """How the products of a call multiply. pad: groups to whole blocks of tokens, where blocks run along them.
    wgrad_follows: a backward will ask for the weight gradient."""

    form: Form
    rounding: int
    wgrad_mx: bool
    pad: bool
    wgrad_follows: bool

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device, pad: bool, wgrad_follows: bool) -> "How":
        form = form_on(recipe, device)
        return cls(form, int(recipe.rounding), is_mx(form) and recipe.wgrad_mx, pad, wgrad_follows)

    @property
    def tokens_follow(self) -> bool:
        """Whether the weight gradient multiplies tokens as they lie, in whole blocks."""
        return self.wgrad_mx and not self.pad and self.wgrad_follows


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        held: Held,
        offs: Tensor,
        out_dtype: torch.dtype,
        how: How,
    ) -> Tensor:
        need_a, need_w, _ = ctx.needs_input_grad[:3]
        form, rounding = how.form, how.rounding
        rows, tokens = activation(a, form, rounding, offs if how.tokens_follow else None)
        w_k, w_n = for_call(w, held, form, rounding, need_a and stays(w))
        saved = (tokens or a) if need_w else None, w_n or w if need_a else None, offs
        save(ctx, saved)
        ctx.dtypes, ctx.how = (a.dtype, w.dtype), how
        return product(rows, w_k, offs, out_dtype, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, w_n, offs = saved_by(ctx)
        (a_dtype, w_dtype), how = ctx.dtypes, ctx.how
        need_a, need_w, need_bias = ctx.needs_input_grad[:3]
        dout, form, rounding = grads[0], how.form, how.rounding
        rows, tokens, da, dw, dbias = dout, dout, None, None, None
        if how.wgrad_mx and need_a and need_w and not how.pad:
            rows, tokens = gradient_operands(dout, form, rounding, offs)
        if need_a:
            w_n = along_n(w_n, form, rounding) if isinstance(w_n, Tensor) else w_n
            da = product(rows_of(rows, form, rounding), w_n, offs, a_dtype)
        if need_w and how.wgrad_mx:
            row_map, ends = pad_to_blocks(offs, dout.shape[0]) if how.pad else (None, offs)
            tokens, a = (tokens_of(t, form, rounding, ends, row_map) for t in (tokens, a))
            dw = weight_gradient(tokens, a, ends, w_dtype)
        elif need_w:
            dw = weight_gradient(dout, a, offs, w_dtype)
        if need_bias:
            dbias = bias_gradient(dout, offs)
        return da, dw, dbias, None, None, None, None


_grouped_mm = differentiable("mxfp8_grouped_mm", _GroupedMM)


def mxfp8_grouped_mm(
    A: Tensor,
    B_t: Weights,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    kernel_preference: Any = "auto",
    wgrad_with_hp: bool = False,
    scale_calculation_mode: Rounding | str = Rounding.RCEIL,
    pad_token_groups_for_grouped_mm: bool = True,
    compute: Compute = "auto",
) -> Tensor:
    """Multiply each group of rows by its own matrix in MXFP8; differentiable in A, B_t and bias.

    A: (M, K) bfloat16 or float32, quantized here along K; or an MXTensor that already is.
    B_t: (G, K, N), the transpose of a contiguous (G, N, K), bfloat16 or float32, quantized here; or the
        QuantizedWeights of that (G, N, K), whose `values` get the gradient. K, N multiples of 32.
    offs: (G,) int32 or int64, where each group of rows ends; rows past the last end give zeros.
    bias: (N,) for all groups or (G, N), one per group, bfloat16 or float32; None. It is added to the sums, before they
        are rounded to out_dtype.
    out_dtype: bfloat16 or float32. The gradient of A has A's dtype, that of B_t has B_t's.
    kernel_preference: "auto", or "emulated" for compute="exact"; torchao's `KernelPreference` is taken by name.
    wgrad_with_hp: weight gradient from bf16 operands; False: from operands re-quantized along the tokens.
    scale_calculation_mode: a `Rounding` or its name.
    pad_token_groups_for_grouped_mm: pad groups to 32 rows where blocks run along the tokens, so that any offs are
        allowed. False, for offs that are multiples of 32 already, saves that pass; the weight gradient of a group
        whose offs are not is NaN. Forward, input gradient and wgrad_with_hp never pad.
    compute: "exact", "fold" or "auto", see `Recipe`.

    B_t is quantized in every call, both ways in one read where A needs a gradient; see `quantize_weights` for several
    calls. The gradient that arrives may be an MXTensor (from `unpermute_hp_fwd_mxfp8_bwd`). Raises
    ValueError (shapes, layout, offs) and TypeError (dtypes); the values of offs are checked for CPU
    tensors, and for CUDA within `debug_checks()`.

    >>> a, w = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(2, 64, 32, dtype=torch.bfloat16)
    >>> mxfp8_grouped_mm(a, w.mT, torch.tensor([1, 2], dtype=torch.int32))[:, 0].tolist()
    [32.0, 32.0, 0.0]
    """
    op = "mxfp8_grouped_mm"
    rounding = Rounding.parse(scale_calculation_mode, op, "scale_calculation_mode")
    compute = recipe_compute(op, kernel_preference, compute)
    check_flag(op, "wgrad_with_hp", wgrad_with_hp)
    check_flag(op, "pad_token_groups_for_grouped_mm", pad_token_groups_for_grouped_mm)
    recipe = Recipe.parse(RECIPES["mxfp8"], rounding=rounding, compute=compute, wgrad_with_hp=wgrad_with_hp)
    return _checked_grouped_mm(op, A, B_t, offs, bias, out_dtype, recipe, pad_token_groups_for_grouped_mm)


_to_mxfp8_then_scaled_grouped_mm = mxfp8_grouped_mm


def bf16_grouped_mm(A: Tensor, B_t: Weights, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`mxfp8_grouped_mm` with bf16 operands: same arguments, same checks, nothing quantized."""
    return _checked_grouped_mm("bf16_grouped_mm", A, B_t, offs, None, out_dtype, RECIPES["bf16"], False)


def fp8_rowwise_grouped_mm(A: Tensor, B_t: Weights, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`mxfp8_grouped_mm` with E4M3 operands under one power of two per row instead of one per 32 values: same
    arguments, same checks. The weight gradient multiplies bf16."""
    return _checked_grouped_mm("fp8_rowwise_grouped_mm", A, B_t, offs, None, out_dtype, RECIPES["fp8_rowwise"], False)


def _checked_grouped_mm(
    op: str,
    A: Tensor,
    B_t: Weights,
    offs: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    recipe: Recipe,
    pad: bool,
) -> Tensor:
    check_rows(op, "A", A)
    held = None
    if isinstance(B_t, QuantizedWeights):
        check_held(op, "B_t", B_t, form_on(recipe, A.device), recipe.rounding)
        held, w = (B_t.as_stored, B_t.transposed), B_t.values
    else:
        check_float_weights(op, "B_t", B_t)
        w = B_t.transpose(-2, -1)
    check_out_dtype(op, out_dtype)
    groups, n, k = w.shape
    if A.shape[1] != k:
        fail(ValueError, op, "A", f"shape {tuple(A.shape)}", f"allowed: (M, {k}), the K of B_t (G, K, N)")
    for name, size in (("K", k), ("N", n)):
        if size % BLOCK:
            fail(ValueError, op, "B_t", f"{name} = {size}", f"allowed: multiples of {BLOCK}")
    if recipe.operands == "fp8_rowwise" and not n:
        fail(ValueError, op, "B_t", "N = 0", f"allowed: N from {BLOCK}; a row without values has no scale")
    if not w.is_contiguous():
        allowed = "allowed: the transpose of a contiguous (G, N, K): w.transpose(-2, -1)"
        fail(ValueError, op, "B_t", f"shape {tuple(w.mT.shape)} with strides {w.mT.stride()}", allowed)
    check_devices(op, "A", A.device, B_t=w)
    offs = check_offs(op, offs, A, groups, "A", "B_t")
    if bias is not None:
        bias = _checked_bias(op, bias, w)
    # Asked here: where gradients are off, `needs_input_grad` still says what would need one.
    how = How.of(recipe, A.device, pad, torch.is_grad_enabled() and w.requires_grad)
    if how.tokens_follow:
        check_token_blocks(op, "A", A.shape[0], offs, "pass pad_token_groups_for_grouped_mm=True")
    return _grouped_mm(A, w, bias, held, offs, out_dtype, how)


def _checked_bias(op: str, bias: Tensor, w: Tensor) -> Tensor:
    """(G, N) fp32."""
    groups, n, _ = w.shape
    require_tensor(op, "bias", bias)
    if bias.dtype not in FLOATS:
        fail(TypeError, op, "bias", f"dtype {bias.dtype}", "allowed: bfloat16 or float32")
    if bias.shape not in ((n,), (groups, n)):
        fail(ValueError, op, "bias", f"shape {tuple(bias.shape)}", f"allowed: ({n},) or ({groups}, {n})")
    check_devices(op, "B_t", w.device, bias=bias)
    return bias.float().expand(groups, n)  # in this order, so that the gradient is rounded after all sums
