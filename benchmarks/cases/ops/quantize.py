"""Cases of the family `quantize`: along rows, columns, both, with one scale per row, back, and of weights."""

from collections.abc import Iterator

from mxep.core_kernels.cases import Layer
from mxep.core_kernels.quantize.cases import TIMED

from ..case import Call, Case, rows_part, values


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    for timed in TIMED:
        (op,), weights = timed.ops, "G" in timed.sizes
        x = values(*(layer.sizes[size] for size in timed.sizes), device=device)
        inputs = call("quantize_row", x) if op == "dequantize" else (x,)
        del x
        yield Case(timed, layer, inputs, rows_part, slice_=1 if weights else 32, formula=None if weights else op)
