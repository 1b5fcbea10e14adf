"""The three products of a linear layer per group of rows, and the forms in which their operands come.

out = a w^T       rows        (q, sf) along the rows, or bf16
da  = dout w      rows        (q, sf) along the rows, or bf16
dw  = dout^T a    tokens      (q, sf) along the tokens, groups padded to whole blocks if need be, or bf16

For code below autograd: no checks, no gradients. `w` is (G, N, K), as a linear layer stores it.
"""

import torch
from torch import Tensor

from ..core_kernels.formats import BLOCK
from . import ops
from .mx_tensor import MXTensor, plain

FLOATS = (torch.bfloat16, torch.float32)
Pair = tuple[Tensor, Tensor]
"""q and sf."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rows_of(x: Tensor | Pair, rounding: int) -> Pair:
    """q and sf of x along its last dim; the bytes that are there if x is MX already."""
    if isinstance(x, tuple):
        return x
    if isinstance(x, MXTensor):
        return x.q.contiguous(), x.sf.contiguous()
    return ops.quantize_row(x.contiguous(), rounding)


def as_bf16(x: Tensor) -> Tensor:
    return plain(x).to(torch.bfloat16).contiguous()


def tokens_of(x: Tensor, rounding: int, row_map: Tensor | None = None) -> Pair:
    """q and sf of x along its rows, which `row_map` pads first."""
    x = plain(x).contiguous()
    return ops.quantize_col(x if row_map is None else ops.permute_rows(x, row_map), rounding)


def pad_to_blocks(offs: Tensor, rows: int) -> Pair:
    """The row map that pads every group to whole blocks of tokens, and where the groups end then."""
    counts = torch.diff(offs, prepend=offs.new_zeros(1))
    row_map, _, _, ends = ops.row_map(counts, rows, counts.shape[0], BLOCK)
    return row_map, ends


def product(
    a: Tensor | Pair, w: Tensor, offs: Tensor, out_dtype: torch.dtype, quantized: bool, rounding: int
) -> Tensor:
    """a (M, K) x w (G, N, K) -> (M, N); rows past the last end are zeros."""
    if quantized:
        return ops.grouped_mm_mx(*rows_of(a, rounding), *ops.quantize_row(w, rounding), offs, dtype_name(out_dtype))
    assert isinstance(a, Tensor)
    return ops.grouped_mm_bf16(as_bf16(a), w.to(torch.bfloat16), offs, dtype_name(out_dtype))


def input_gradient(
    dout: Tensor | Pair, w: Tensor, offs: Tensor, out_dtype: torch.dtype, quantized: bool, rounding: int
) -> Tensor:
    """dout (M, N) x w (G, N, K) -> (M, K)."""
    if quantized:
        return ops.grouped_mm_mx(*rows_of(dout, rounding), *ops.quantize_col(w, rounding), offs, dtype_name(out_dtype))
    assert isinstance(dout, Tensor)
    w_t = w.transpose(-2, -1).to(torch.bfloat16).contiguous()
    return ops.grouped_mm_bf16(as_bf16(dout), w_t, offs, dtype_name(out_dtype))


def weight_gradient(dout: Tensor | Pair, a: Tensor | Pair, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    """dout (M, N), a (M, K), both bf16 or both quantized along the tokens -> (G, N, K)."""
    if isinstance(dout, tuple):
        return ops.grouped_wgrad_mx(*dout, *a, offs, dtype_name(out_dtype))
    assert isinstance(a, Tensor)
    return ops.grouped_wgrad_bf16(as_bf16(dout), as_bf16(a), offs, dtype_name(out_dtype))
