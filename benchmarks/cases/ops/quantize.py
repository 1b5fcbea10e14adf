"""Cases of the family `quantize`: along rows, columns, both, with one scale per row, back, and of weights."""

from collections.abc import Iterator

from ..case import Call, Case, one, rows_part, values
from ..shapes import Layer

OPS = ("quantize_row", "quantize_rowwise", "quantize_col", "quantize_both", "dequantize", "quantize_weights")


def cases(layer: Layer, call: Call, device: str) -> Iterator[Case]:
    m, k = layer.tokens, layer.dim
    x, shape = values(m, k, device=device), {"M": m, "K": k}
    for op in ("quantize_row", "quantize_rowwise", "quantize_col", "quantize_both"):
        yield Case(op, shape, (x,), one(op), rows_part, m, formula=op)
    yield Case("dequantize", shape, call("quantize_row", x), one("dequantize"), rows_part, m, formula="dequantize")
    del x
    g, n = layer.local_experts, layer.hiddens[0]
    w = values(g, n, k, device=device)
    for direction in ("row", "col"):
        shape = {"G": g, "N": n, "K": k, "layout": direction}
        yield Case("quantize_weights", shape, (w,), one(f"quantize_{direction}"), rows_part, g, slice_=1)
