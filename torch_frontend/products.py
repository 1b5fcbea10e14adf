"""The three products of a linear layer per group of rows, and the forms in which their operands come.

out = a w^T       rows        as the form says
da  = dout w      rows        as the form says
dw  = dout^T a    tokens      bf16, or along the tokens as the form says; groups padded to whole blocks if need be

form      rows                          tokens
"bf16"    bf16                          bf16
"mx"      (q, sf), one sf per 32        (q_t, sf_t), one sf per 32
"fold"    (q, sf), one sf per row       (q_t, sf), one sf per row and span of 256 tokens
"row"     (q, sf), one sf per row       bf16

MX operands are folded here, at the last moment: bytes travel and are saved as MX. What is bf16 or fp32 becomes both
folded operands in one read of it, and a backward keeps those of the tokens instead of it: half of the memory. Hopper's
tensor cores take no scales per 32: there form "mx" multiplies dequantized bf16, and what is dequantized here serves all
of its products. For code below autograd: no checks, no gradients.
"""

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from ..core_kernels.recipe import Form, Recipe
from . import ops
from ._device import arch_of
from .mx_tensor import MXTensor, plain
from .weights import MX, Folded, Operand, Upcast, as_multiplied, quantize_rows


def form_on(recipe: Recipe, device: torch.device) -> Form:
    """What the recipe's products multiply on a device."""
    return recipe.form(arch_of(device))


def is_mx(form: Form) -> bool:
    """Whether operands are blocks of 32 before they are multiplied."""
    return form in ("mx", "fold")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows_of(x: Operand, form: Form, rounding: int) -> Operand:
    """x along its last dim as the form multiplies it; a Folded or Upcast as it is."""
    if isinstance(x, Folded | Upcast):
        return x
    if form == "bf16":
        assert isinstance(x, Tensor)
        return as_bf16(x)
    if isinstance(x, MXTensor) and form != "row":
        x = MX(x.q.contiguous(), x.sf.contiguous())
    if isinstance(x, MX):
        return as_multiplied(x) if form == "mx" else Folded(*ops.fold_rows(*x))
    return quantize_rows(plain(x).contiguous(), form, rounding)


def as_bf16(x: Tensor) -> Tensor:
    return plain(x).to(torch.bfloat16).contiguous()


def activation(x: Operand, form: Form, rounding: int, ends: Tensor | None) -> tuple[Operand, Folded | None]:
    """x along its last dim as the form multiplies it and, from the same read of x, along its rows; None there where x
    is MX already or the form does not fold. ends: whole blocks of tokens, or None where nobody will ask for x along
    them."""
    if ends is None or form != "fold" or not isinstance(x, Tensor) or isinstance(x, MXTensor):
        return rows_of(x, form, rounding), None
    qf, row_sf, qf_t, span_sf = ops.quantize_both_fold(x.contiguous(), ends, rounding)
    return Folded(qf, row_sf), Folded(qf_t, span_sf)


def tokens_of(x: Operand, form: Form, rounding: int, ends: Tensor, row_map: Tensor | None = None) -> Operand:
    """x along its rows, which `row_map` pads first, up to `ends`; what is no tensor already runs along them."""
    if isinstance(x, Folded | Upcast):
        return x
    if not isinstance(x, MX):
        x = plain(x).contiguous()
        x = MX(*ops.quantize_col(x if row_map is None else ops.permute_rows(x, row_map), rounding))
    return Folded(*ops.fold_groups(*x, ends)) if form == "fold" else as_multiplied(x)


def gradient_operands(dout: Tensor, form: Form, rounding: int, ends: Tensor) -> tuple[Operand, Operand]:
    """What the input gradient multiplies, and what the weight gradient does along the tokens, in whole blocks."""
    if form == "mx" and not isinstance(dout, MXTensor):
        q, sf, q_t, sf_t = ops.quantize_both(dout.contiguous(), rounding)  # one read for both products
        return MX(q, sf), as_multiplied(MX(q_t, sf_t))
    rows, tokens = activation(dout, form, rounding, ends)
    return rows, tokens or tokens_of(dout, form, rounding, ends)


def pad_to_blocks(offs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The row map that pads every group to whole blocks of tokens, and where the groups end then."""
    counts = torch.diff(offs, prepend=offs.new_zeros(1))
    row_map, _, _, ends = ops.row_map(counts, rows, counts.shape[0], BLOCK)
    return row_map, ends


def product(rows: Operand, w: Operand, offs: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """rows (M, K) x w (G, N, K) [+ bias (G, N) fp32], rounded once -> (M, N); rows past the last end are zeros.

    Both in one form: of an activation and the weights along K, or of a gradient and the weights along N.
    """
    name = dtype_name(out_dtype)
    if bias is not None and isinstance(rows, Folded):
        return ops.grouped_mm_fold_bias(*rows, *w, bias.contiguous(), offs, name)
    if bias is not None:  # the other products take none: added to their sums
        sums = product(rows, w, offs, torch.float32)
        return (sums + bias_of_rows(bias, offs, sums.shape[0])).to(out_dtype)
    if isinstance(rows, Tensor):
        return ops.grouped_mm_bf16(rows, w, offs, name)
    if isinstance(rows, Upcast):
        return ops.grouped_mm_bf16(*rows, *w, offs, name)
    multiply = ops.grouped_mm_fold if isinstance(rows, Folded) else ops.grouped_mm_mx
    return multiply(*rows, *w, offs, name)


def bias_of_rows(bias: Tensor, offs: Tensor, rows: int) -> Tensor:
    """bias (G, N) -> (rows, N): each row's group's; zeros past the last end."""
    group = torch.searchsorted(offs, torch.arange(rows, dtype=offs.dtype, device=offs.device), right=True)
    return torch.nn.functional.pad(bias, (0, 0, 0, 1))[group]


def bias_gradient(dout: Tensor, offs: Tensor) -> Tensor:
    """dout (M, N) -> (G, N) fp32: each group's sum of rows, as the product of dout^T and ones.

    fp32 is summed as two bf16 numbers, which leave out 2^-17 of it.
    """
    dout = plain(dout)
    high = dout.to(torch.bfloat16).contiguous()
    parts = [high]
    if dout.dtype == torch.float32:
        parts.append(torch.where(high.isfinite(), dout - high, 0).to(torch.bfloat16).contiguous())
    ones = torch.ones_like(high[:, :8], memory_format=torch.contiguous_format)
    return torch.stack([ops.grouped_wgrad_bf16(part, ones, offs, "float32")[..., 0] for part in parts]).sum(0)


def weight_gradient(dout: Operand, a: Operand, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """dout (M, N) and a (M, K), both plain or both as `tokens_of` made them -> (G, N, K)."""
    if isinstance(dout, Tensor):
        assert isinstance(a, Tensor)
        return ops.grouped_wgrad_bf16(as_bf16(dout), as_bf16(a), offs, dtype_name(out_dtype))
    if isinstance(dout, Upcast):
        assert isinstance(a, Upcast)
        return ops.grouped_wgrad_bf16_t(*dout, *a, offs, dtype_name(out_dtype))
    assert not isinstance(a, Tensor)
    multiply = ops.grouped_wgrad_fold if isinstance(dout, Folded) else ops.grouped_wgrad_mx
    return multiply(*dout, *a, offs, dtype_name(out_dtype))
