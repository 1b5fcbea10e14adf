"""The grouped product and its gradient.

forward   x --quantize rows--> MX --grouped_mm(w along K)--> out
dgrad     dx <--grouped_mm(w along N)-- MX <--quantize rows-- dout      (or dout is MX already)
wgrad     dw <--grouped_wgrad-- dout, x     bf16 operands, or both re-quantized along the tokens
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from . import ops
from ._call import check_ends, checks_values, require_tensor
from .mx_tensor import MXTensor, plain

FLOATS = (torch.bfloat16, torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(x: Tensor, rounding: int) -> tuple[Tensor, Tensor]:
    """q and sf of x along its last dim; the bytes that are there if x is MX already."""
    if isinstance(x, MXTensor):
        return x.q.contiguous(), x.sf.contiguous()
    return ops.quantize_row(x.contiguous(), rounding)


def _bf16(x: Tensor) -> Tensor:
    return plain(x).to(torch.bfloat16).contiguous()


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b_t: Tensor,
        offs: Tensor,
        out_dtype: torch.dtype,
        quantized: bool,
        wgrad_with_hp: bool,
        pad: bool,
        rounding: int,
    ) -> Tensor:
        w = b_t.transpose(-2, -1)
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b_t, offs)
        ctx.a_dtype = a.dtype
        ctx.quantized, ctx.wgrad_with_hp, ctx.pad, ctx.rounding = quantized, wgrad_with_hp, pad, rounding
        if not quantized:
            return ops.grouped_mm_bf16(_bf16(a), w.to(torch.bfloat16), offs, _name(out_dtype))
        return ops.grouped_mm_mx(*_rows(a, rounding), *ops.quantize_row(w, rounding), offs, _name(out_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b_t, offs = ctx.saved_tensors
        dout, w, rounding = grads[0], b_t.transpose(-2, -1), ctx.rounding
        need_da, need_dw = ctx.needs_input_grad[:2]
        wgrad_mx = ctx.quantized and not ctx.wgrad_with_hp
        rows = cols = da = db_t = None
        if wgrad_mx and need_da and need_dw and not ctx.pad and not isinstance(dout, MXTensor):
            q, sf, q_t, sf_t = ops.quantize_both(dout.contiguous(), rounding)  # one read for both products
            rows, cols = (q, sf), (q_t, sf_t)
        if need_da and ctx.quantized:
            rows = rows or _rows(dout, rounding)
            da = ops.grouped_mm_mx(*rows, *ops.quantize_col(w, rounding), offs, _name(ctx.a_dtype))
        elif need_da:
            da = ops.grouped_mm_bf16(_bf16(dout), b_t.to(torch.bfloat16).contiguous(), offs, _name(ctx.a_dtype))
        if need_dw and wgrad_mx:
            tokens = _padded(plain(dout), plain(a), offs) if ctx.pad else (plain(dout), plain(a), offs)
            db_t = _wgrad_mx(*tokens, cols, rounding, _name(w.dtype)).transpose(-2, -1)
        elif need_dw:
            db_t = ops.grouped_wgrad_bf16(_bf16(dout), _bf16(a), offs, _name(w.dtype)).transpose(-2, -1)
        return da, db_t, None, None, None, None, None, None


# Dynamo would trace `backward` with a gradient of the output's type; here an MXTensor may arrive for a
# plain output. AOTAutograd, which runs the real engine, handles it: let Dynamo pass these calls on.
@torch.compiler.allow_in_graph
def _grouped_mm(*args: Any) -> Tensor:
    return cast(Tensor, _GroupedMM.apply(*args))


def _padded(dout: Tensor, a: Tensor, offs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands with every group padded to whole blocks of tokens, and where the groups end then."""
    counts = torch.diff(offs, prepend=offs.new_zeros(1))
    row_map, _, _, ends = ops.row_map(counts, a.shape[0], counts.shape[0], BLOCK)
    return ops.permute_rows(dout.contiguous(), row_map), ops.permute_rows(a.contiguous(), row_map), ends


def _wgrad_mx(
    dout: Tensor, a: Tensor, offs: Tensor, cols: tuple[Tensor, Tensor] | None, rounding: int, out_dtype: str
) -> Tensor:
    """Weight gradient with both operands quantized along the tokens, dout unless `cols` is that already."""
    dout_cols = ops.quantize_col(dout.contiguous(), rounding) if cols is None else cols
    return ops.grouped_wgrad_mx(*dout_cols, *ops.quantize_col(a.contiguous(), rounding), offs, out_dtype)


def mxfp8_grouped_mm(
    A: Tensor,
    B_t: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    wgrad_with_hp: bool = False,
    scale_calculation_mode: Rounding | str = Rounding.RCEIL,
    pad_token_groups_for_grouped_mm: bool = False,
) -> Tensor:
    """Multiply each group of rows by its own matrix in MXFP8; differentiable in A, B_t and bias.

    A: (M, K) bfloat16 or float32, quantized here along K; or an MXTensor that already is.
    B_t: (G, K, N), the transpose of a contiguous (G, N, K), bfloat16 or float32; K, N multiples of 32.
    offs: (G,) int32, where each group of rows ends; rows past the last end give zeros.
    bias: (N,) for all groups or (G, N), one per group; None.
    out_dtype: bfloat16 or float32. The gradient of A has A's dtype, that of B_t has B_t's.
    wgrad_with_hp: weight gradient from bf16 operands; False: from operands re-quantized along the
        tokens, which needs ends that are multiples of 32, or the padding below.
    scale_calculation_mode: a `Rounding` or its name.
    pad_token_groups_for_grouped_mm: pad groups to 32 rows where blocks run along the tokens, so that
        any counts are allowed. The forward and the input gradient never need it.

    The gradient that arrives may be an MXTensor (from `unpermute_hp_fwd_mxfp8_bwd`). Raises
    ValueError (shapes, layout, ends) and TypeError (dtypes); the ends' values are checked for CPU
    tensors, and for CUDA within `debug_checks()`.

    >>> a, w = torch.ones(3, 32, dtype=torch.bfloat16), torch.ones(2, 64, 32, dtype=torch.bfloat16)
    >>> mxfp8_grouped_mm(a, w.mT, torch.tensor([1, 2], dtype=torch.int32))[:, 0].tolist()
    [32.0, 32.0, 0.0]
    """
    op = "mxfp8_grouped_mm"
    rounding = int(Rounding.parse(scale_calculation_mode))
    _check_grouped_mm(op, A, B_t, offs, out_dtype)
    for name, flag in (
        ("wgrad_with_hp", wgrad_with_hp),
        ("pad_token_groups_for_grouped_mm", pad_token_groups_for_grouped_mm),
    ):
        if not isinstance(flag, bool):
            allowed = "allowed: bool (there is no kernel_preference here; see capabilities())"
            fail(TypeError, op, name, repr(flag), allowed)
    has_wgrad = torch.is_grad_enabled() and B_t.requires_grad
    if has_wgrad and not wgrad_with_hp and not pad_token_groups_for_grouped_mm:
        _check_token_blocks(op, A, offs)
    out = _grouped_mm(A, B_t, offs, out_dtype, True, wgrad_with_hp, pad_token_groups_for_grouped_mm, rounding)
    return _add_bias(op, out, offs, bias)


_to_mxfp8_then_scaled_grouped_mm = mxfp8_grouped_mm


def bf16_grouped_mm(A: Tensor, B_t: Tensor, offs: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`mxfp8_grouped_mm` with bf16 operands: same arguments, same checks, nothing quantized."""
    _check_grouped_mm("bf16_grouped_mm", A, B_t, offs, out_dtype)
    return _grouped_mm(A, B_t, offs, out_dtype, False, True, False, 0)


def _check_grouped_mm(op: str, A: Tensor, B_t: Tensor, offs: Tensor, out_dtype: torch.dtype) -> None:
    for name, x, rank in (("A", A, 2), ("B_t", B_t, 3)):
        require_tensor(op, name, x)
        if x.dtype not in FLOATS:
            fail(TypeError, op, name, f"dtype {x.dtype}", "allowed: bfloat16 or float32 (or an MXTensor for A)")
        if x.dim() != rank:
            fail(ValueError, op, name, f"shape {tuple(x.shape)}", f"allowed: {rank} dims")
    if isinstance(B_t, MXTensor):
        fail(TypeError, op, "B_t", "an MXTensor", "allowed: bfloat16 or float32 weights, quantized here")
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
    if not isinstance(offs, Tensor) or offs.dtype != torch.int32:
        fail(TypeError, op, "offs", getattr(offs, "dtype", type(offs).__name__), "allowed: an int32 tensor (G,)")
    if offs.shape != (groups,):
        fail(ValueError, op, "offs", f"shape {tuple(offs.shape)}", f"allowed: ({groups},), one end per group of B_t")
    for name, x in (("B_t", B_t), ("offs", offs)):
        if x.device != A.device:
            fail(ValueError, op, name, f"device {x.device}", f"allowed: {A.device}, where A is; move it with .to()")
    # While compiling there are no values; the op checks them again when it runs.
    if not torch.compiler.is_compiling() and checks_values(offs.device):
        check_ends(op, "offs", offs, A.shape[0])


def _check_token_blocks(op: str, A: Tensor, offs: Tensor) -> None:
    remedy = "pass wgrad_with_hp=True or pad_token_groups_for_grouped_mm=True"
    if A.shape[0] % BLOCK:
        fail(ValueError, op, "A", f"M = {A.shape[0]}", f"allowed: multiples of {BLOCK}; {remedy}")
    if not torch.compiler.is_compiling() and checks_values(offs.device):
        check_ends(op, "offs", offs, A.shape[0], BLOCK, remedy)


class _AddBias(torch.autograd.Function):
    """out (M, N) + its group's row of bias (G, N); the gradient of out passes as it came, MX or not."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
        # One more group of zeros takes the rows past the last end.
        lengths = torch.diff(offs, prepend=offs.new_zeros(1), append=offs.new_full((1,), out.shape[0])).long()
        ctx.save_for_backward(lengths)
        ctx.dtype = bias.dtype
        rows = torch.nn.functional.pad(bias.float(), (0, 0, 0, 1)).repeat_interleave(
            lengths, dim=0, output_size=out.shape[0]
        )
        return (out.float() + rows).to(out.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (lengths,) = ctx.saved_tensors
        sums = torch.segment_reduce(plain(grads[0]).float(), "sum", lengths=lengths, axis=0)
        return grads[0], sums[:-1].to(ctx.dtype), None


@torch.compiler.allow_in_graph
def _with_bias(*args: Any) -> Tensor:
    return cast(Tensor, _AddBias.apply(*args))


def _add_bias(op: str, out: Tensor, offs: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return out
    n, groups = out.shape[1], offs.shape[0]
    require_tensor(op, "bias", bias)
    if bias.dtype not in FLOATS:
        fail(TypeError, op, "bias", f"dtype {bias.dtype}", "allowed: bfloat16 or float32")
    if bias.shape not in ((n,), (groups, n)):
        fail(ValueError, op, "bias", f"shape {tuple(bias.shape)}", f"allowed: ({n},) or ({groups}, {n})")
    if bias.device != out.device:
        fail(ValueError, op, "bias", f"device {bias.device}", f"allowed: {out.device}; move it with .to()")
    return _with_bias(out, bias.expand(groups, n), offs)
