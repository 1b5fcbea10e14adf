"""Rows of a transfer in mapped memory: values and scales of a row next to each other, in whole granules of bytes."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...core_kernels.formats import packed_width
from ...core_kernels.peer.programs.rows import RowBytes
from ...core_kernels.policy.recipe import Recipe, TransferName
from ...core_kernels.registry import OPS
from ..ops import direct as ops
from ..ops.call import call_out
from ..ops.mx_tensor import MXTensor

BF16 = torch.bfloat16


class Rows(NamedTuple):
    """The rows of one transfer: packed MXFP8 if there is a rounding, else values of the dtype."""

    width: int
    dtype: torch.dtype
    rounding: int | None

    @classmethod
    def of(cls, recipe: Recipe, name: TransferName, width: int, dtype: torch.dtype) -> "Rows":
        return cls(width, dtype, int(recipe.rounding) if recipe.sends_mx(name) else None)

    @property
    def nbytes(self) -> RowBytes:
        if self.rounding is None:
            return RowBytes(self.width * self.dtype.itemsize, 0)
        return RowBytes(self.width, packed_width(self.width) - self.width)

    def write(self, x: Tensor, memory: Tensor) -> None:
        """Write x (T, width) to memory (T, nbytes.length) uint8, as the transfer sends it."""
        if self.rounding is None:
            memory.view(self.dtype).copy_(x)
        elif packed_width(self.width) == memory.shape[1]:
            call_out((memory,), OPS["quantize_row_packed"], x.contiguous(), rounding=self.rounding)
        else:
            packed = ops.quantize_row_packed(x.contiguous(), self.rounding)
            memory[:, : packed.shape[1]].copy_(packed)

    def encoded(self, x: Tensor) -> Tensor:
        """(T, nbytes.length // 2) bf16: the bytes of x, as `write` writes them."""
        if self.rounding is None:
            return x.to(self.dtype).contiguous().view(BF16)
        out = torch.empty((x.shape[0], self.nbytes.length), dtype=torch.uint8, device=x.device)
        self.write(x, out)
        return out.view(BF16)

    def operand(self, values: Tensor, scales: Tensor) -> Tensor | MXTensor:
        """What a product reads: of the arrays of a pull."""
        return values.view(self.dtype) if self.rounding is None else MXTensor(values, scales, self.dtype)

    def decoded(self, memory: Tensor) -> Tensor:
        """(T, width) of the dtype, of memory (T, nbytes.length)."""
        if self.rounding is None:
            return memory.view(self.dtype)
        return MXTensor.from_packed(memory[:, : packed_width(self.width)], self.dtype).dequantize()


class Transfers(NamedTuple):
    """The rows of the four transfers of a call."""

    dispatch: Rows
    combine: Rows
    combine_grad: Rows
    dispatch_grad: Rows

    @classmethod
    def of(cls, recipe: Recipe, dim: int, dtype: torch.dtype, width: int) -> "Transfers":
        """Of rows (.., dim) to the experts, and (.., width) back."""
        of = (dim, dtype), (width, BF16), (width, BF16), (dim, dtype)
        names: tuple[TransferName, ...] = ("dispatch", "combine", "combine_grad", "dispatch_grad")
        return cls(*(Rows.of(recipe, name, *rows) for name, rows in zip(names, of, strict=True)))

    @property
    def row_bytes(self) -> int:
        """Of the longer rows to the experts."""
        return max(self.dispatch.nbytes.length, self.combine_grad.nbytes.length)

    @property
    def slot_bytes(self) -> int:
        """Of the longer rows to the tokens."""
        return max(self.combine.nbytes.length, self.dispatch_grad.nbytes.length)
