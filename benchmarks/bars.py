"""What a GPU must reach, and whether a recorded line does.

>>> print(bar({"op": "quantize_col", "frontend": "torch", "peer": "copy", "of_roof": 0.87}))
of a copy 0.85: 0.87 ok
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

OF_A_COPY = {
    "quantize_row": 0.90,
    "quantize_row_fold": 0.90,
    "quantize_rowwise": 0.90,
    "dequantize": 0.90,
    "quantize_col": 0.85,
    "quantize_both": 0.85,
    "permute_mx": 0.85,
    "permute_mx_fold": 0.85,
    "unpermute": 0.85,
    "combine": 0.85,
    "swiglu_row_fwd": 0.85,
    "swiglu_row_bwd": 0.85,
    "swiglu_both_fwd": 0.85,
    "swiglu_both_bwd": 0.85,
    "quantize_weights": 0.80,
}
AT_MOST_US = {"routing": 100.0, "host_overhead": 30.0}
JAX_OVER_TORCH = 1.05


class Bar(NamedTuple):
    what: str
    required: float
    measured: float
    met: bool

    def __str__(self) -> str:
        return f"{self.what} {self.required:g}: {self.measured:.2f} {'ok' if self.met else 'MISSED'}"


def bar(row: Mapping[str, Any]) -> Bar | None:
    """The bar that this line is held to: of an op's lines, torch's beside a copy and JAX's beside torch have one."""
    op, peer = row["op"], row["peer"]
    if row["frontend"] == "jax":
        over = row["us"] / row["peer_us"]
        return Bar("JAX / torch", JAX_OVER_TORCH, over, over <= JAX_OVER_TORCH) if peer == "torch_frontend" else None
    if peer == "copy" and op in OF_A_COPY:
        return Bar("of a copy", OF_A_COPY[op], row["of_roof"], row["of_roof"] >= OF_A_COPY[op])
    if peer == "copy" and op in AT_MOST_US:
        return Bar("us", AT_MOST_US[op], row["us"], row["us"] < AT_MOST_US[op])
    return None
