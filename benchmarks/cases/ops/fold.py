"""Cases of the family `fold`: quantize, then rescale to one scale per row, or per feature and 256 tokens."""

from collections.abc import Iterator
from typing import Any

from mxep.core_kernels.cases import Layer
from mxep.core_kernels.fold.cases import TIMED
from mxep.core_kernels.formats import WEIGHT_HEADROOM
from torch import Tensor

from ..case import Call, Case, equal_groups, group_part, rows_part, values


def _in_two_ops(call: Call, w: Tensor) -> tuple[Any, ...]:
    return call("fold_rows", *call("quantize_col", w), headroom=WEIGHT_HEADROOM)


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    row, both, requantize, matrix, transposed = TIMED
    x, g, (length, ends) = (
        values(layer.tokens, layer.dim, device=device),
        layer.local_experts,
        equal_groups(layer, device),
    )
    yield Case(row, layer, (x,), rows_part, formula=row.name)
    yield Case(both, layer, (x, ends), group_part, g * length, length, both.name)
    mx = call("quantize_row", x)
    yield Case(requantize, layer, (*mx, ends), group_part, g * length, length, requantize.name)
    del x, mx
    w = values(g, layer.hiddens[0], layer.dim, device=device, octaves=0.5)  # as a layer's weights
    yield Case(matrix, layer, (w,), rows_part, slice_=1, formula=matrix.name)
    yield Case(transposed, layer, (w,), rows_part, slice_=1, formula=transposed.name, separate=_in_two_ops)
