"""MXFP8 rows of a row map, gathered by what reads them.

    tokens x (T, K) --quantize--> packed (T, K + K/32) --.-- row_map (P,) --gather--> MXTensor (P, K)
                                                         '-- and row_map -----------> GatheredRows (P, K)

A folded product reads the packed rows through the map (core_kernels/fold/gathered/plan_permute.py), and so does a
weight gradient; then nothing stores the rows of the groups. Anything else reads `q` and `sf`, which gather them.
"""

from typing import Any

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ..ops import direct as ops
from ..ops.launch import packed_buffer
from ..ops.mx_tensor import MXTensor, mx_rows
from ..ops.private import wrapper


class GatheredRows(MXTensor):
    """MXFP8 rows of a row map that nothing has stored: row i is packed[row_map[i]], zeros where row_map[i] is -1.

    packed (R, K + K/32) uint8, rows `[q | sf]`; row_map (P,) int32. A folded product reads the packed rows through the
    map. Every access to `q` or `sf` gathers the rows.
    """

    packed: Tensor
    row_map: Tensor

    @property
    def q(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.contiguous_parts()[0]

    @property
    def sf(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.contiguous_parts()[1]

    def contiguous_parts(self) -> tuple[Tensor, Tensor]:
        return ops.permute_mx(self.packed, self.row_map)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["packed", "row_map"], self.orig_dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], orig_dtype: torch.dtype, size: Any, stride: Any
    ) -> "GatheredRows":
        return gathered_rows(inner["packed"], inner["row_map"], orig_dtype)


def gathered_rows(packed: Tensor, row_map: Tensor, orig_dtype: torch.dtype) -> GatheredRows:
    """`GatheredRows`, unchecked."""
    k = packed.shape[1] // (BLOCK + 1) * BLOCK
    self = wrapper(GatheredRows, (row_map.shape[0], k), orig_dtype, packed.device)
    self.packed, self.row_map, self.orig_dtype = packed, row_map, orig_dtype
    return self


def quantized_rows(x: Tensor, rounding: int, row_map: Tensor, folds: bool) -> MXTensor:
    """The rows x (R, K) of a map, quantized before they are gathered. folds: a folded product reads the rows next."""
    packed = ops.quantize_row_packed(x.contiguous(), rounding)
    if folds:
        return gathered_rows(packed, row_map, x.dtype)
    q, sf = ops.permute_mx(packed, row_map)
    return mx_rows(q, sf, x.dtype)


def mapped_rows(mx: MXTensor, row_map: Tensor, orig_dtype: torch.dtype, folds: bool) -> MXTensor:
    """The rows of a map. folds: a folded product reads them next."""
    # A compiled graph does not see the memory of a tensor.
    packed = packed_buffer(mx.q, mx.sf) if folds and not torch.compiler.is_compiling() else None
    if packed is not None:
        return gathered_rows(packed, row_map, orig_dtype)
    q, sf = ops.permute_q_sf(mx.q, mx.sf, row_map)
    return mx_rows(q, sf, orig_dtype)
