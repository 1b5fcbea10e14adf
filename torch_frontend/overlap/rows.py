"""Rows of a transfer in mapped memory: their parts, one array each, and where each part begins."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.policy.recipe import Recipe, TransferName
from ...core_kernels.registry import OPS
from ..ops.call import call_out

BF16 = torch.bfloat16
Where = Literal["experts", "tokens"]
ALIGNMENT = 256
"""Bytes: each part of a buffer begins at a multiple."""


class Part(NamedTuple):
    """One of the arrays that are sent together: the values of a row and their dtype."""

    width: int
    dtype: torch.dtype


PROB = Part(1, torch.float32)


class Rows(NamedTuple):
    """The rows of one transfer: q and sf if there is a rounding, else values of the dtype."""

    width: int
    dtype: torch.dtype
    rounding: int | None

    @classmethod
    def of(cls, recipe: Recipe, name: TransferName, width: int, dtype: torch.dtype) -> "Rows":
        return cls(width, dtype, int(recipe.rounding) if recipe.sends_mx(name) else None)

    @property
    def parts(self) -> list[Part]:
        if self.rounding is None:
            return [Part(self.width, self.dtype)]
        return [Part(self.width, torch.uint8), Part(self.width // BLOCK, torch.uint8)]

    def write(self, x: Tensor, buffer: Sequence[Tensor]) -> None:
        """Write x to `buffer` as the transfer sends it, unless x is there already. Later parts are not written."""
        if self.rounding is not None:
            call_out(tuple(buffer[:2]), OPS["quantize_row"], x.contiguous(), rounding=self.rounding)
        elif buffer[0].data_ptr() != x.data_ptr():
            buffer[0].copy_(x)


def list_transfer_parts(recipe: Recipe, dim: int, dtype: torch.dtype, width: int) -> list[tuple[Where, list[Part]]]:
    """The most parts that each transfer of a call sends: rows (.., dim) to the experts, (.., width) back."""
    return [
        ("experts", [*Rows.of(recipe, "dispatch", dim, dtype).parts, PROB]),
        ("experts", Rows.of(recipe, "combine_grad", width, BF16).parts),
        ("tokens", Rows.of(recipe, "combine", width, BF16).parts),
        ("tokens", [*Rows.of(recipe, "dispatch_grad", dim, dtype).parts, PROB]),
    ]


def offsets_of(rows: int, parts: Sequence[Part]) -> list[int]:
    """The first byte of each part in a buffer of so many rows, and the end of the last part."""
    sizes = [-(-rows * part.width * part.dtype.itemsize // ALIGNMENT) * ALIGNMENT for part in parts]
    return list(accumulate(sizes, initial=0))


def views_of(memory: Tensor, rows: int, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """The parts of a buffer of `rows` rows."""
    sizes = [rows * part.width * part.dtype.itemsize for part in parts]
    return tuple(
        memory[at : at + nbytes].view(part.dtype).view(rows, part.width)
        for at, nbytes, part in zip(offsets_of(rows, parts), sizes, parts, strict=False)
    )
