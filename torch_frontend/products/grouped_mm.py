"""The grouped matrix product and its gradients.

    out = x w^T      x (M, K)    --along K--> operand -.
                     w (G, N, K) --along K--> operand -+--> out (M, N) [+ bias]
    dx  = dout w     dout (M, N) --along N--> operand -.
                     w           --along N--> operand -+--> dx (M, K)
    dw  = dout^T x   dout, x: bf16, or both quantized along the tokens --> dw (G, N, K)
    dbias            the sums of dout's rows, computed as a product with ones

The forward saves x. With compute="fold" and recipe "mxfp8" it saves the E4M3 token operand of x instead, which the same
read of x produces: half of the memory of bf16.
"""

import warnings
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..ops.checks import (
    check_bias,
    check_counts,
    check_flag,
    check_floats,
    check_group_ends,
    check_shape,
    out_dtype_of,
    reads_values,
    require_rows,
)
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.launch import check_devices
from .forms.form import AddedBias
from .groups import GroupEnds, ends_of
from .products import ProductOptions, bias_gradient
from .weights import (
    Cached,
    Weights,
    along_n,
    check_weights,
    format_of,
    is_transpose,
    outlives_forward,
    quantize_for_call,
    values_and_cached,
)


class MMNeeds(NamedTuple):
    """Whether x, w and bias need gradients."""

    x: bool = False
    w: bool = False
    bias: bool = False


class MMCall(NamedTuple):
    """The arguments of one call of the product other than tensors. transposed: whether w is the transpose of contiguous
    weights, as its gradient then is."""

    options: ProductOptions
    out_dtype: torch.dtype
    needs: MMNeeds = MMNeeds()
    transposed: bool = False


class MMSaved(NamedTuple):
    """What `MMBackward` reads: x or its tokens, w or its operand along N."""

    x: Any
    w: Any
    group_ends: Tensor


def mm_forward(
    call: MMCall,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    cached: Cached,
    group_ends: Tensor,
    out: Tensor | None = None,
) -> tuple[Tensor, MMSaved]:
    """Return (M, N), written to `out` if there is one, and what `MMBackward` reads."""
    needs, form = call.needs, call.options.form
    rows, tokens = form.activation(x, group_ends, call.options.whole_blocks)
    w_k, w_n = quantize_for_call(w, cached, form, needs.x and outlives_forward(w))
    saved = MMSaved((tokens or x) if needs.w else None, w_n or w if needs.x else None, group_ends)
    added = None if bias is None else AddedBias(bias)
    return form.mm(rows, w_k, group_ends, call.out_dtype, added, out, clear_rest=True), saved


class MMBackward:
    """The gradients of one product, in parts: other work may run between the gradient of x and the weights' gradients.

    saved: MMSaved. dtypes: of x and w.
    """

    def __init__(self, call: MMCall, saved: Any, dout: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        self.x, self.w_n, self.group_ends = saved
        self.call, self.form, self.dout, self.dtypes = call, call.options.form, dout, dtypes
        self.rows, self.tokens = dout, dout
        if call.needs.x and call.needs.w and not call.options.pad:
            self.rows, self.tokens = self.form.gradient(dout, self.group_ends)

    def inputs(self, out: Tensor | None = None) -> tuple[Tensor | None, None]:
        """The gradient of x, written to `out` if there is one, and of weights of its rows, which has none."""
        if not self.call.needs.x:
            return None, None
        w_n = along_n(self.w_n, self.form)
        rows = self.form.rows(self.rows, self.group_ends)
        return self.form.mm(rows, w_n, self.group_ends, self.dtypes[0], out=out, clear_rest=True), None

    def weights(self) -> tuple[Tensor | None, ...]:
        """The gradients of w and of bias."""
        needs, dw = self.call.needs, None
        if needs.w:
            groups = self.call.options.token_groups(self.group_ends, self.dout.shape[0])
            dout, x = self.form.tokens(self.tokens, groups), self.form.tokens(self.x, groups)
            if self.call.transposed:  # in memory as the weights are
                dw = self.form.wgrad(x, dout, groups.ends, self.dtypes[1]).mT
            else:
                dw = self.form.wgrad(dout, x, groups.ends, self.dtypes[1])
        return dw, bias_gradient(self.dout, self.group_ends) if needs.bias else None


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, cached: Cached, group_ends: Tensor, call: MMCall
    ) -> Tensor:
        needs = MMNeeds._make(ctx.needs_input_grad[:3])
        ctx.call, ctx.dtypes = call._replace(needs=needs, transposed=is_transpose(w)), (x.dtype, w.dtype)
        out, saved = mm_forward(ctx.call, x, w, bias, cached, group_ends)
        save(ctx, saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        steps = MMBackward(ctx.call, saved_by(ctx), grads[0], ctx.dtypes)
        dx, _ = steps.inputs()
        dw, dbias = steps.weights()
        return dx, dw, dbias, None, None, None


_grouped_mm = differentiable("grouped_mm", _GroupedMM)


class Names(NamedTuple):
    """The names in error messages: of the public function and of its arguments. `w_shape` is the shape of w there."""

    op: str = "grouped_mm"
    x: str = "x"
    w: str = "w"
    group_ends: str = "group_ends"
    pad: str = "pad_token_groups"
    w_shape: str = "(G, N, K)"


def grouped_mm(
    x: Tensor,
    w: Weights,
    group_ends: GroupEnds | None = None,
    *,
    recipe: Recipe | str = "mxfp8",
    bias: Tensor | None = None,
    out_dtype: torch.dtype | str = "bfloat16",
    pad_token_groups: bool = True,
    group_sizes: Tensor | None = None,
) -> Tensor:
    """Multiply each group of rows by its own matrix, out = x w^T; differentiable in x, w and bias.

    Args:
        x: (M, K) bfloat16 or float32, quantized here along K; or an MXTensor, used as it is. The recipes "bf16" and
            "fp8_..." dequantize an MXTensor.
        w: (G, N, K) bfloat16 or float32, contiguous, as a linear layer stores it, or the transpose of a contiguous (G,
            K, N), w.mT; neither is copied, except the second by "fp8_rowwise". Or its QuantizedWeights, whose `values`
            get the gradient; or frozen weights, an MXTensor. K and N are multiples of 32.
        group_ends: (G,) int32 or int64, the end of each group of rows; or the RowMap or Route that laid the rows out,
            which has them. Rows past the last end give zeros. A UserWarning tells where these are more than half of the
            rows.
        recipe: a `Recipe` or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".
        bias: (N,) for all groups or (G, N), bfloat16 or float32; or None. The kernel adds it to the fp32 sums, before
            the rounding to out_dtype.
        out_dtype: "bfloat16" or "float32", or the torch.dtype. The gradients of x, w and bias have their argument's
            dtype.
        pad_token_groups: the weight gradient of recipe "mxfp8" quantizes blocks of 32 tokens. True pads each group to
            whole blocks, so that groups of any size are allowed. False saves those passes for group ends that are
            multiples of 32; the weight gradient of any other group is NaN.
        group_sizes: (G,) of an integer dtype, the rows of each group, in place of group_ends.

    Returns:
        (M, N) of out_dtype. w is quantized in every call; `quantize_weights` quantizes it once for several calls. The
        gradient of the result may be an MXTensor.

    Raises:
        ValueError: shapes, layout, both or none of group_ends and group_sizes, their values. Their values are checked
            for CPU tensors, and for CUDA tensors within `debug_checks()`.
        TypeError: dtypes.

    Example:
        >>> x, w = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(2, 64, 32, dtype=torch.bfloat16)
        >>> grouped_mm(x, w, torch.tensor([1, 2]))[:, 0].tolist()
        [32.0, 32.0, 0.0]
        >>> grouped_mm(x, w, group_sizes=torch.tensor([1, 2]))[:, 0].tolist()
        [32.0, 32.0, 32.0]

    Source:
        OCP Microscaling Formats (MX) Specification v1.0, section 6.
    """
    check_flag("grouped_mm", "pad_token_groups", pad_token_groups)
    recipe = Recipe.parse(recipe)
    ends, known = ends_by_hand("grouped_mm", group_ends, group_sizes, x, w)
    return checked_grouped_mm(Names(), x, w, ends, bias, out_dtype, recipe, pad_token_groups, known)


def ends_by_hand(
    op: str, group_ends: GroupEnds | None, group_sizes: Tensor | None, x: Tensor, w: Weights
) -> tuple[Tensor, list[int] | None]:
    """The ends of the groups of x, of two arguments of the public function `op`, and their values if it read them.
    Warns its caller of counts in place of ends, which leave most rows out.

    Raises TypeError (dtype) and ValueError (both or none of the arguments, shape, values).
    """
    if (group_ends is None) == (group_sizes is None):
        got = "none" if group_ends is None else "both"
        fail(ValueError, op, "group_ends, group_sizes", got, "allowed: one of them, the ends or the counts of groups")
    rows = x.shape[0] if isinstance(x, Tensor) and x.dim() else 0
    if group_sizes is not None:
        check_counts(op, "group_sizes", group_sizes, x.device if isinstance(x, Tensor) else None)
        groups = w.shape[0] if isinstance(w, Weights) and len(w.shape) else "G"
        check_shape(op, "group_sizes", group_sizes, (groups,))
        if reads_values(group_sizes):
            require_rows(op, "group_sizes", group_sizes, rows)
        return torch.cumsum(group_sizes, 0, dtype=torch.int32), None
    assert group_ends is not None
    ends = None
    if isinstance(group_ends, Tensor) and _are_known_ends(group_ends):
        ends = group_ends.tolist()
        if any(a > b for a, b in pairwise(ends)):
            allowed = f"allowed: non-decreasing ends from 0 up to {rows}, the rows; counts go to group_sizes="
            fail(ValueError, op, "group_ends", ends, allowed)
        if 2 * ends[-1] < rows:
            few = f"the last end is {ends[-1]} of {rows} rows, and the rows past it give zeros"
            warnings.warn(f"{op}: group_ends: {few}; counts go to group_sizes=", stacklevel=3)
    return ends_of(op, group_ends, x), ends


def _are_known_ends(ends: Tensor) -> bool:
    is_list = ends.layout == torch.strided and ends.dim() == 1 and ends.numel() > 0
    return is_list and ends.dtype in (torch.int32, torch.int64) and reads_values(ends)


def checked_grouped_mm(
    names: Names,
    x: Tensor,
    w: Weights,
    group_ends: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | str,
    recipe: Recipe,
    pad: bool,
    known: list[int] | None = None,
) -> Tensor:
    """`grouped_mm` with its checks, under the names of the public function that calls it. known: of
    `check_group_ends`."""
    op = names.op
    check_floats(op, names.x, x)
    check_weights(op, names.w, w, format_of(recipe, x.device), recipe.rounding)
    values, cached = values_and_cached(w)
    out_dtype = out_dtype_of(op, out_dtype)
    groups, n, k = values.shape
    if x.shape[1] != k:
        allowed = f"allowed: (M, {k}), the K of {names.w} {names.w_shape}"
        fail(ValueError, op, names.x, f"shape {tuple(x.shape)}", allowed)
    for dim, size in (("K", k), ("N", n)):
        if size % BLOCK:
            fail(ValueError, op, names.w, f"{dim} = {size}", f"allowed: multiples of {BLOCK}")
    if recipe.operands in ("fp8_rowwise", "fp8_blockwise") and not n:
        fail(ValueError, op, names.w, "N = 0", f"allowed: N from {BLOCK}; an empty row has no scale")
    if not values.is_contiguous() and not is_transpose(values):
        allowed = "allowed: a contiguous (G, N, K), or the transpose of a contiguous (G, K, N)"
        fail(ValueError, op, names.w, f"strides {values.stride()} of (G, N, K)", allowed)
    check_devices(op, names.x, x.device, **{names.w: values})
    # `needs_input_grad` in the forward is set even under `no_grad`.
    need_wgrad = torch.is_grad_enabled() and values.requires_grad
    options = ProductOptions.of(recipe, x.device, pad, need_wgrad)
    remedy = f"pass {names.pad}=True" if options.whole_blocks else None
    group_ends = check_group_ends(op, names.group_ends, group_ends, x, groups, names.x, names.w, remedy, known)
    if bias is not None:
        bias = check_bias(op, "bias", bias, groups, n, values.device)
    return _grouped_mm(x, values, bias, cached, group_ends, MMCall(options, out_dtype))
