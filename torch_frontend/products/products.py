"""What the products of one call multiply; padding for their weight gradients; gradients of their biases."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.policy.recipe import Recipe
from ..ops import direct as ops
from ..ops.mx_tensor import dequantized
from .forms.form import Format, TokenGroups, as_bf16
from .weights import format_of


class ProductOptions(NamedTuple):
    """form: of the operands. pad: groups are padded to whole blocks of tokens for the weight gradient, if it reads
    them. need_wgrad: a backward will compute the weight gradient."""

    form: Format
    pad: bool
    need_wgrad: bool

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device, pad: bool, need_wgrad: bool) -> "ProductOptions":
        form = format_of(recipe, device)
        return cls(form, pad and form.wgrad_mx, need_wgrad)

    @property
    def whole_blocks(self) -> bool:
        """Whether the weight gradient reads unpadded tokens, so that group ends must be multiples of 32."""
        return self.form.wgrad_mx and not self.pad and self.need_wgrad

    def token_groups(self, group_ends: Tensor, rows: int) -> TokenGroups:
        """The groups of a weight gradient."""
        if not self.pad:
            return TokenGroups(group_ends)
        counts = torch.diff(group_ends, prepend=group_ends.new_zeros(1))
        row_map, _, _, padded_ends = ops.row_map(counts, rows, counts.shape[0], BLOCK)
        return TokenGroups(padded_ends, row_map)


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
