"""The product of a dense layer and its gradients: the grouped product of one group that has all rows.

    out = x w^T + bias   x (M, K) --rows, tokens--> one read        w (N, K) --along K, along N--> one read
    dx  = dout w         dout (M, N) --rows, tokens--> one read
    dw  = dout^T x       tokens of dout, tokens of x
    dbias                the sum of dout's rows

Ops of form "fold" with recipe "mxfp8" on Hopper: their kernels, with memset if scratch memory is cleared, and the bytes
that each reads and writes, of bf16 x, w and dout. A product reads its operands once at least: the bytes are the floor.
The last columns are MB at 16384 rows, (K, N) as in the head.

    op                            kernels    bytes           (4096, 4096) (7168, 7168) (4096, 14336) (7168, 18432)
    forward
      the group's end             1          4                         0            0             0             0
      quantize_both_fold of x     memset, 1  2 MK + 2 MK             268          470           268           470
      quantize_matrix_fold of w   memset, 4  2 NK + 2 NK              67          206           235           528
      grouped_mm_fold             1          MK + NK + 2 MN          218          404           596           854
    backward
      quantize_both_fold of dout  memset, 1  2 MN + 2 MN             268          470           940          1208
      grouped_mm_fold             1          MN + NK + 2 MK          218          404           428           669
      grouped_wgrad_fold          1          MN + MK + 2 NK          168          338           419           684

Each activation, weight and gradient is read once in bf16, and its two operands are written once: no fewer bytes make
both. Of w the first 256 values of each row and column are read twice. `F.linear` has three kernels. Nothing else is
launched, and nothing reads a value on the host. Layers that read the same x share its operands (`SharedRows`).

The weight gradient of recipe "mxfp8" quantizes blocks of 32 tokens. With another number of rows x and dout are copied
with up to 31 rows of zeros, which add nothing to a product; without a weight gradient nothing is copied.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..ops.call import FLOATS, require_tensor
from ..ops.checks import check_autocast, check_floats, check_plain, out_dtype_of
from ..ops.differentiable import differentiable, save, saved_by
from ..ops.launch import check_devices
from ..ops.mx_tensor import MXTensor, dequantized
from ..ops.private import version_of
from .forms.form import AddedBias, Format, Operands
from .grouped_mm import MMBackward, MMCall, MMNeeds, MMSaved
from .products import ProductOptions
from .weights import (
    Cached,
    QuantizedWeights,
    Weights,
    check_weights,
    is_transpose,
    outlives_forward,
    quantize_for_call,
    values_and_cached,
)


class _Kept(NamedTuple):
    """Operands of x, and what they depend on. readers: calls that may still read them."""

    x: "weakref.ref[Tensor]"
    version: int
    form: Format
    whole: bool
    operands: Operands
    readers: int


class SharedRows:
    """The operands of x, for several layers that read the same tensor one after the other.

    The first layer makes them, the last one drops them; so do the end of x and a call with another x. readers: the
    number of layers. A version counter shows a write to x, except through `.data`. A tensor of `inference_mode` has no
    such counter: each layer makes its own operands.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._kept: _Kept | None = None

    def operands(self, x: Tensor, form: Format, whole: bool, make: Callable[[], Operands]) -> Operands:
        """The operands that an earlier layer has made of x, or what `make` returns."""
        kept, self._kept = self._kept, None
        if x.is_inference():
            return make()
        if kept is None or kept.x() is not x or (kept.version, kept.form, kept.whole) != (version_of(x), form, whole):
            kept = _Kept(weakref.ref(x, self._drop), version_of(x), form, whole, make(), self.readers)
        if kept.readers > 1:
            self._kept = kept._replace(readers=kept.readers - 1)
        return kept.operands

    def _drop(self, ended: "weakref.ref[Tensor]") -> None:
        kept = self._kept
        if kept is not None and kept.x is ended:
            self._kept = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedRows":
        # One copy for all layers of a copied model, without operands.
        return memo.setdefault(id(self), SharedRows(self.readers))

    def __getstate__(self) -> dict[str, Any]:
        return {"readers": self.readers, "_kept": None}


def _in_whole_blocks(x: Tensor) -> Tensor:
    """x with rows of zeros up to a multiple of 32."""
    return F.pad(dequantized(x), (0, 0, 0, -x.shape[0] % BLOCK))


def _first_rows(operand: Any, rows: int) -> Any:
    """The first rows of an operand along the rows: every tensor of it has a row for each."""
    return operand[:rows] if isinstance(operand, Tensor) else type(operand)._make(t[:rows] for t in operand)


def _one_end(rows: int, device: torch.device) -> Tensor:
    return torch.full((1,), rows, dtype=torch.int32, device=device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, cached: Cached, shared: SharedRows | None, call: MMCall
    ) -> Tensor:
        needs, form, whole = MMNeeds._make(ctx.needs_input_grad[:3]), call.options.form, call.options.whole_blocks
        rows_x, both = x.reshape(-1, x.shape[-1]), needs.x and outlives_forward(w)
        rows, w = rows_x.shape[0], w.view(1, *w.shape)
        given = _in_whole_blocks(rows_x) if whole and rows % BLOCK else rows_x
        ends = _one_end(given.shape[0], x.device)
        if shared is None:
            along_rows, tokens = form.activation(given, ends, whole)
        else:
            along_rows, tokens = shared.operands(x, form, whole, lambda: form.activation(given, ends, whole))
        padded = given.shape[0] != rows
        w_k, w_n = quantize_for_call(w, cached, form, both)
        ctx.call = call._replace(needs=needs._replace(bias=False), transposed=is_transpose(w))
        ctx.x_shape, ctx.dtypes = x.shape, (x.dtype, w.dtype)
        ctx.bias_dtype = bias.dtype if bias is not None and needs.bias else None
        save(ctx, MMSaved((tokens or given) if needs.w else None, w_n or w if needs.x else None, ends))
        added = None if bias is None else AddedBias(bias.float()[None], one_group=True)
        along_rows, ends = (_first_rows(along_rows, rows), _one_end(rows, x.device)) if padded else (along_rows, ends)
        out = form.mm(along_rows, w_k, ends, call.out_dtype, added, clear_rest=False)
        return out.view(*x.shape[:-1], out.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout = grads[0] if grads[0].dim() == 2 else grads[0].reshape(-1, grads[0].shape[-1])
        dbias = None
        if ctx.bias_dtype is not None:
            dbias = dequantized(dout).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        rows, whole = dout.shape[0], ctx.call.needs.w and ctx.call.options.form.wgrad_mx
        padded = whole and rows % BLOCK
        steps = MMBackward(ctx.call, saved_by(ctx), _in_whole_blocks(dout) if padded else dout, ctx.dtypes)
        dx, _ = steps.inputs()
        dw, _ = steps.weights()
        dx = None if dx is None else dx[:rows].view(ctx.x_shape)
        return dx, None if dw is None else dw[0], dbias, None, None, None


_linear = differentiable("linear", _Linear)


def linear(
    x: Tensor,
    w: Weights,
    bias: Tensor | None = None,
    *,
    recipe: Recipe | str = "mxfp8",
    out_dtype: torch.dtype | str | None = None,
) -> Tensor:
    """Compute x w^T + bias, `torch.nn.functional.linear` with a recipe; differentiable in x, w and bias.

    Args:
        x: (..., K) bfloat16 or float32, any strides and any number of rows; quantized here along K. With a number of
            rows that is no multiple of 32, recipe "mxfp8" copies x and the gradient for the weight gradient.
        w: (N, K) bfloat16 or float32, contiguous, as `torch.nn.Linear` stores it, or the transpose of a contiguous (K,
            N). Or `quantize_weights(w[None])`, whose `values` get the gradient; or frozen weights, an MXTensor (N, K).
            K and N are multiples of 32.
        bias: (N,) bfloat16 or float32; or None. It is added to the fp32 sums, before the rounding to out_dtype.
        recipe: a `Recipe` or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".
        out_dtype: "bfloat16" or "float32", or the torch.dtype. None: x's, or bfloat16 within torch.autocast to it. The
            gradients of x, w and bias have their argument's dtype.

    Returns:
        (..., N) of out_dtype. w is quantized in every call; `quantize_weights` quantizes it once for several calls.

    Raises:
        ValueError: shapes, layout.
        TypeError: dtypes; DTensors, which `MXLinear` takes; autocast to float16.

    Example:
        >>> x, w = torch.ones(3, 5, 32), torch.ones(64, 32)
        >>> linear(x, w, bias=torch.ones(64))[0, 0, 0].item()
        33.0

    Source:
        OCP Microscaling Formats (MX) Specification v1.0, section 6.
    """
    return checked_linear("linear", x, w, bias, Recipe.parse(recipe), out_dtype)


def checked_linear(
    op: str,
    x: Tensor,
    w: Weights,
    bias: Tensor | None,
    recipe: Recipe,
    out_dtype: torch.dtype | str | None = None,
    shared: SharedRows | None = None,
) -> Tensor:
    """`linear` with its checks, in the name of `op`. shared: the operands of x, of layers that read the same x."""
    require_tensor(op, "x", x)
    check_plain(op, "x", x)
    if x.dtype not in FLOATS:
        fail(TypeError, op, "x", f"dtype {x.dtype}", "allowed: bfloat16 or float32")
    if isinstance(w, QuantizedWeights):
        if w.shape[0] != 1:
            allowed = "allowed: one group: quantize_weights(w[None]) of w (N, K)"
            fail(ValueError, op, "w", f"QuantizedWeights of {w.shape[0]} groups", allowed)
        values, cached = values_and_cached(w)
        values = values[0]
    elif isinstance(w, MXTensor):
        values, cached = w.view(w.shape[1:]) if w.dim() == 3 and w.shape[0] == 1 else w, None
        check_floats(op, "w", values)
    else:
        check_floats(op, "w", w)
        check_plain(op, "w", w)
        values, cached = w, None
    options = ProductOptions.of(recipe, x.device, False, torch.is_grad_enabled() and values.requires_grad)
    if isinstance(w, QuantizedWeights | MXTensor):
        grouped = values.view(1, *values.shape) if isinstance(w, MXTensor) else w
        check_weights(op, "w", grouped, options.form, recipe.rounding)
    n, k = values.shape
    if not x.dim() or x.shape[-1] != k:
        fail(ValueError, op, "x", f"shape {tuple(x.shape)}", f"allowed: (..., {k}), the K of w (N, K)")
    for dim, size in (("K", k), ("N", n)):
        if size % BLOCK or not size:
            fail(ValueError, op, "w", f"{dim} = {size}", f"allowed: positive multiples of {BLOCK}")
    if not values.is_contiguous() and not values.mT.is_contiguous():
        allowed = "allowed: a contiguous (N, K), or the transpose of a contiguous (K, N)"
        fail(ValueError, op, "w", f"strides {values.stride()} of (N, K)", allowed)
    check_devices(op, "w", values.device, x=x)
    if bias is not None:
        _check_bias(op, bias, n)
        check_devices(op, "w", values.device, bias=bias)
    call = MMCall(options, _result_dtype(op, x, out_dtype))
    return _linear(x, values, bias, cached, None if torch.compiler.is_compiling() else shared, call)


def _check_bias(op: str, bias: Tensor, n: int) -> None:
    require_tensor(op, "bias", bias)
    check_plain(op, "bias", bias)
    if bias.dtype not in FLOATS:
        fail(TypeError, op, "bias", f"dtype {bias.dtype}", "allowed: bfloat16 or float32")
    if bias.shape != (n,):
        fail(ValueError, op, "bias", f"shape {tuple(bias.shape)}", f"allowed: ({n},)")


def _result_dtype(op: str, x: Tensor, out_dtype: object) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype_of(op, out_dtype)
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    check_autocast(op, x)
    return torch.bfloat16
