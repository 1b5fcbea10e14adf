"""The three products of a linear layer per group of rows, and the formats of their operands.

    out = x w^T       row operand x row operand        format: the recipe's form
    dx  = dout w      row operand x row operand
    dw  = dout^T x    token operand x token operand    bf16, or the form along the tokens; groups may be padded first

    form      row operand                   token operand, transposed
    "bf16"    bf16                          bf16
    "mx"      (q, sf), one sf per 32        (q_t, sf_t), one sf per 32
    "fold"    (q, sf), one sf per row       (q_t, sf), one sf per feature and chunk of 256 tokens
    "row"     (q, sf), one sf per row       bf16
    "block"   (q, sf), one fp32 sf per 128  bf16                   and per 128 x 128 of weights

Transport and the backward's saved tensors hold MX bytes; this file folds them directly before the product. With form
"fold", one read of a bf16 or fp32 activation produces both of its operands, and the backward saves the token operand in
place of the activation: half of the memory. MX rows become a token operand in one pass. `GatheredRows`, packed rows
with a row map, become either operand in one pass, and are not stored themselves. Hopper's tensor cores take no scales
per 32, so form "mx" there dequantizes an operand once and multiplies bf16. This code runs below autograd: no checks, no
gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK, GRADIENT_HEADROOM
from ..core_kernels.recipe import Form, Recipe
from ..core_kernels.registry import OPS
from . import _direct as ops
from ._call import into
from ._launch import dtype_name
from .gathered_rows import GatheredRows
from .mx_tensor import MXTensor, dequantized
from .weights import (
    KN,
    MX,
    Blockwise,
    Folded,
    Operand,
    Upcast,
    WeightOperand,
    as_multiplied,
    form_of,
    mx_rows,
    quantize_rows,
)


class ProductOptions(NamedTuple):
    """What the products of one call multiply.

    wgrad_mx: the weight gradient multiplies operands quantized along the tokens. pad: groups are padded to whole
    blocks of tokens for it. need_wgrad: a backward will compute the weight gradient.
    """

    form: Form
    rounding: int
    wgrad_mx: bool
    pad: bool
    need_wgrad: bool

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device, pad: bool, need_wgrad: bool) -> "ProductOptions":
        form = form_of(recipe, device)
        return cls(form, int(recipe.rounding), is_mx(form) and recipe.wgrad_mx, pad, need_wgrad)

    @property
    def whole_blocks(self) -> bool:
        """Whether the weight gradient reads unpadded tokens, so that group ends must be multiples of 32."""
        return self.wgrad_mx and not self.pad and self.need_wgrad


def is_mx(form: Form) -> bool:
    """Whether operands are blocks of 32 before the product."""
    return form in ("mx", "fold")


def product(
    rows: Operand,
    w: WeightOperand,
    group_ends: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    row_weights: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """rows (M, K) x w (G, N, K) [+ row_weights (M,) bias (G, N), fp32], rounded once -> (M, N); rows past the last end
    are zeros. out: the tensor to write; None is a new one.

    Both operands have one form: an activation and the weights along K, or a gradient and the weights along N.
    """
    if bias is not None and row_weights is None and isinstance(rows, Folded):
        return _written("grouped_mm_fold_bias", (*rows, *w, bias.contiguous(), group_ends), out_dtype, out)
    if bias is not None:  # the other kernels take no bias: it is added to their fp32 sums
        sums = product(rows, w, group_ends, torch.float32)
        added = bias_of_rows(bias, group_ends, sums.shape[0])
        if row_weights is not None:
            in_group = torch.arange(sums.shape[0], device=sums.device) < group_ends[-1:]
            added = added * torch.where(in_group, row_weights, 0)[:, None]
        return (sums + added).to(out_dtype) if out is None else out.copy_(sums + added)
    if isinstance(rows, Tensor | Upcast):
        multiply = "grouped_mm_bf16_kn" if isinstance(w, KN) else "grouped_mm_bf16"
    elif isinstance(rows, Blockwise):
        multiply = "grouped_mm_blockwise"
    else:
        multiply = "grouped_mm_fold" if isinstance(rows, Folded) else "grouped_mm_mx"
    operands = [(x,) if isinstance(x, Tensor) else x for x in (rows, w)]
    return _written(multiply, (*operands[0], *operands[1], group_ends), out_dtype, out)


def pair_of_products(
    rows: Operand, weights: tuple[WeightOperand, WeightOperand], group_ends: Tensor, out_dtype: torch.dtype,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`product` of the same rows with two weights of one shape; folded ones without biases in one launch."""
    (w, w2), (bias, bias2) = weights, biases
    if bias is bias2 is None and isinstance(rows, Folded) and isinstance(w, Folded) and isinstance(w2, Folded):
        return ops.grouped_mm_fold_pair(*rows, *w, *w2, group_ends, dtype_name(out_dtype))
    first = product(rows, w, group_ends, out_dtype, bias)
    return first, product(rows, w2, group_ends, out_dtype, bias2)


def _written(name: str, operands: tuple[Tensor, ...], out_dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """The only output of the op, in `out` if there is one."""
    if out is None:
        return getattr(ops, name)(*operands, dtype_name(out_dtype))
    into((out,), OPS[name], *operands, out_dtype=dtype_name(out_dtype))
    return out


def sum_of_products(
    rows: Operand, w: WeightOperand, rows2: Operand, w2: WeightOperand, group_ends: Tensor, out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """rows x w + rows2 x w2, rounded once -> (M, N); operands and out as in `product`."""
    if isinstance(rows, Folded) and isinstance(rows2, Folded):
        return _written("grouped_mm_fold_sum", (*rows, *w, *rows2, *w2, group_ends), out_dtype, out)
    if isinstance(w, KN) and isinstance(w2, KN):
        assert isinstance(rows, Tensor)
        assert isinstance(rows2, Tensor)
        return _written("grouped_mm_bf16_kn_sum", (rows, *w, rows2, *w2, group_ends), out_dtype, out)
    first, second = product(rows, w, group_ends, torch.float32), product(rows2, w2, group_ends, torch.float32)
    # Added and rounded in one kernel: 10 bytes per value, and not 18.
    return torch.add(first, second, out=first.new_empty(first.shape, dtype=out_dtype) if out is None else out)


def weight_gradient(
    dout: Operand, x: Operand, group_ends: Tensor, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """dout (M, N) and x (M, K), both plain or both from `token_operand` -> (G, N, K); out as in `product`."""
    if isinstance(dout, Tensor):
        assert isinstance(x, Tensor)
        return _written("grouped_wgrad_bf16", (as_bf16(dout), as_bf16(x), group_ends), out_dtype, out)
    assert not isinstance(x, Tensor)
    if isinstance(dout, Upcast):
        multiply = "grouped_wgrad_bf16_t"
    else:
        multiply = "grouped_wgrad_fold" if isinstance(dout, Folded) else "grouped_wgrad_mx"
    return _written(multiply, (*dout, *x, group_ends), out_dtype, out)


def pair_of_weight_gradients(
    douts: tuple[Operand | None, Operand | None], x: Operand, group_ends: Tensor,
    out_dtypes: tuple[torch.dtype, torch.dtype], out: Sequence[Tensor | None] = (None, None),
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """`weight_gradient` of each of two gradients that is not None, with the same x; folded ones in one launch, if `out`
    has both places or none."""
    (first, second), (place, place2), dtype = douts, out, out_dtypes[0]
    if isinstance(first, Folded) and isinstance(second, Folded) and out_dtypes == (dtype, dtype):
        assert isinstance(x, Folded)
        operands = *first, *x, *second, group_ends
        if place is not None and place2 is not None:
            into((place, place2), OPS["grouped_wgrad_fold_pair"], *operands, out_dtype=dtype_name(dtype))
            return place, place2
        if place is place2 is None:
            return ops.grouped_wgrad_fold_pair(*operands, dtype_name(dtype))
    dw, dw2 = (
        None if dout is None else weight_gradient(dout, x, group_ends, dtype, place)
        for dout, dtype, place in zip(douts, out_dtypes, out, strict=True)
    )
    return dw, dw2


def bias_of_rows(bias: Tensor, group_ends: Tensor, rows: int) -> Tensor:
    """bias (G, N) -> (rows, N), the bias of each row's group; zeros past the last end."""
    row = torch.arange(rows, dtype=group_ends.dtype, device=group_ends.device)
    group = torch.searchsorted(group_ends, row, right=True)
    return torch.nn.functional.pad(bias, (0, 0, 0, 1))[group]


def bias_gradient(dout: Tensor, group_ends: Tensor, row_weights: Tensor | None = None) -> Tensor:
    """dout (M, N) -> (G, N) fp32, the sum of each group's rows, computed as the product of dout^T and ones or
    row_weights (M,) fp32.

    An fp32 dout is the sum of two bf16 numbers, which leaves out 2^-17 of each value.
    """
    dout = dequantized(dout)
    high = dout.to(torch.bfloat16).contiguous()
    parts = [high]
    if dout.dtype == torch.float32:
        parts.append(torch.where(high.isfinite(), dout - high, 0).to(torch.bfloat16).contiguous())
    if row_weights is None:
        ones = torch.ones_like(high[:, :8], memory_format=torch.contiguous_format)
        return torch.stack([ops.grouped_wgrad_bf16(part, ones, group_ends, "float32")[..., 0] for part in parts]).sum(0)
    columns = _in_thirds(row_weights).T.contiguous()
    return torch.stack([ops.grouped_wgrad_bf16(part, columns, group_ends, "float32") for part in parts]).sum((0, -1))


def bias_row_products(dout: Tensor, bias: Tensor, group_ends: Tensor) -> Tensor:
    """dout (M, N), bias (G, N) fp32 -> (M,) fp32, the product of each row and the bias of its group; zeros past the
    last end."""
    thirds = _in_thirds(bias.flatten()).unflatten(1, bias.shape).transpose(0, 1).contiguous()
    return ops.grouped_mm_bf16(as_bf16(dout), thirds, group_ends, "float32").sum(-1)


def _in_thirds(x: Tensor) -> Tensor:
    """fp32 (n,) -> (8, n) bf16, three rows of 8 bits each, whose sum is x, and zeros: the kernels take 8."""
    high = x.to(torch.bfloat16)
    rest = torch.where(high.isfinite(), x - high, 0)
    middle = rest.to(torch.bfloat16)
    low = (rest - middle).to(torch.bfloat16)
    return torch.stack([high, middle, low, *[torch.zeros_like(high)] * 5])


def row_operand(x: Operand, form: Form, rounding: int, headroom: int = 0) -> Operand:
    """x along its last dim in the given form. Quantized operands but MX are returned unchanged.

    headroom: of a fold; gathered rows have none.
    """
    if isinstance(x, Folded | Blockwise | Upcast):
        return x
    if form == "bf16":
        assert isinstance(x, Tensor)
        return as_bf16(x)
    if form == "fold" and isinstance(x, GatheredRows):
        return Folded(*ops.permute_mx_fold(x.packed, x.row_map))
    if isinstance(x, MXTensor) and is_mx(form):
        x = MX(*x.contiguous_parts())
    if isinstance(x, MX):
        return mx_rows(x, form, headroom)
    return quantize_rows(dequantized(x).contiguous(), form, rounding, headroom)


def gradient_rows(x: Operand, form: Form, rounding: int) -> Operand:
    """`row_operand` of dgate or dup. Folded, they have the bytes of swiglu_bwd_fold, whichever op quantizes them."""
    return row_operand(x, form, rounding, GRADIENT_HEADROOM)


def as_bf16(x: Tensor) -> Tensor:
    return dequantized(x).to(torch.bfloat16).contiguous()


def quantize_activation(
    x: Operand, form: Form, rounding: int, group_ends: Tensor | None
) -> tuple[Operand, Folded | None]:
    """Return (row operand, token operand) of x, both from one read.

    The token operand is None if x is MX already or the form is not "fold". group_ends: multiples of 32; None if no
    weight gradient reads the tokens in whole blocks.
    """
    if group_ends is None or form != "fold" or not isinstance(x, Tensor) or isinstance(x, MXTensor):
        return row_operand(x, form, rounding), None
    qf, row_sf, qf_t, chunk_sf = ops.quantize_both_fold(x.contiguous(), group_ends, rounding)
    return Folded(qf, row_sf), Folded(qf_t, chunk_sf)


def token_operand(x: Operand, form: Form, rounding: int, group_ends: Tensor, row_map: Tensor | None = None) -> Operand:
    """x quantized along its rows, transposed. `row_map` pads the rows first; group_ends are the ends after padding.

    A Folded or Upcast operand is returned unchanged; an MX operand is along the tokens already.
    """
    assert not isinstance(x, Blockwise)
    if isinstance(x, Folded | Upcast):
        return x
    if form == "fold" and isinstance(x, GatheredRows) and row_map is None:
        return Folded(*ops.permute_mx_col_fold(x.packed, x.row_map, group_ends, rounding))
    if form == "fold" and isinstance(x, MXTensor):
        q, sf = x.contiguous_parts()
        q, sf = (q, sf) if row_map is None else ops.permute_q_sf(q, sf, row_map)
        return Folded(*ops.requantize_col_fold(q, sf, group_ends, rounding))
    if not isinstance(x, MX):
        x = dequantized(x).contiguous()
        x = MX(*ops.quantize_col(x if row_map is None else ops.permute_rows(x, row_map), rounding))
    return Folded(*ops.fold_groups(*x, group_ends)) if form == "fold" else as_multiplied(x)


def output_gradient_operands(dout: Tensor, form: Form, rounding: int, group_ends: Tensor) -> tuple[Operand, Operand]:
    """Return (row operand, token operand) of dout (M, N), whose groups are whole blocks of tokens."""
    if form == "mx" and not isinstance(dout, MXTensor):
        q, sf, q_t, sf_t = ops.quantize_both(dout.contiguous(), rounding)  # one read for both products
        return MX(q, sf), as_multiplied(MX(q_t, sf_t))
    rows, tokens = quantize_activation(dout, form, rounding, group_ends)
    return rows, tokens or token_operand(dout, form, rounding, group_ends)


def pad_to_blocks(group_ends: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row map that pads every group to whole blocks of tokens, and the group ends after padding."""
    counts = torch.diff(group_ends, prepend=group_ends.new_zeros(1))
    row_map, _, _, padded_ends = ops.row_map(counts, rows, counts.shape[0], BLOCK)
    return row_map, padded_ends
