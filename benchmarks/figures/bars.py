"""The bars that figures on a GPU must reach, and whether a recorded line reaches its bar.

>>> print(bar({"op": "quantize_col", "frontend": "torch", "peer": "copy", "of_roof": 0.87}))
of a copy 0.85: 0.87 ok

The bar of a grouped product is the peer's time divided by ours, or the share of cuBLAS's dense FP8 rate.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mxep.core_kernels.registry import OPS

# Share of a device copy's bandwidth, by op.
OF_A_COPY = {
    "quantize_row": 0.90,
    "quantize_row_fold": 0.90,
    "quantize_rowwise": 0.90,
    "dequantize": 0.90,
    "quantize_col": 0.85,
    "quantize_both": 0.85,
    "quantize_both_fold": 0.75,
    "requantize_col_fold": 0.55,
    "quantize_matrix_fold": 0.55,
    "quantize_matrix_fold_t": 0.80,  # normal values: 0.88 to 0.99 of a copy
    "permute_mx": 0.85,
    "permute_mx_fold": 0.85,
    "unpermute": 0.85,
    "combine": 0.85,
    "swiglu_row_fwd": 0.85,
    "swiglu_row_fold_fwd": 0.85,
    "swiglu_row_bwd": 0.85,
    "swiglu_both_bwd": 0.85,
    "swiglu_all_bwd": 0.70,
    "swiglu_fold_bwd": 0.50,  # of the bytes of its arrays; it moves up to 15/11 of them
    "quantize_weights": 0.80,
}
AT_MOST_US = {"route": 100.0, "route_bwd": 100.0, "routing": 100.0, "host_overhead": 25.0}
US_PER_OUTPUT = 2.0
"""Added to the limit of `host_overhead`: an output is an allocation. On the slower of two hosts an op of one output
took 16 to 24 us, of four 31, of eleven 37."""
JAX_OVER_TORCH = 1.05
JAX_PRODUCT_OVER_TORCH = 1.03
# Time of the peer divided by ours, by op and peer.
TIMES_AS_LONG = {
    ("grouped_mm_fwd", "torch_grouped_mm_bf16"): 1.8,
    ("grouped_mm_fwd", "torch_scaled_grouped_mm"): 1.1,
    ("grouped_mm_wgrad", "torch_grouped_mm_bf16"): 1.65,
    ("grouped_mm_exact", "torch_grouped_mm_bf16"): 0.9,
    ("grouped_mm_fwd", "jax_ragged_dot_bf16"): 10.0,
}
# By recipe, weights held: at K above SMALL_K, and at most SMALL_K, where quantization is a larger share of the time.
AUTOGRAD_TIMES_AS_LONG = {"mxfp8": (1.6, 1.45), "mxfp8_wgrad_with_hp": (1.35, 1.2)}
SMALL_K = 2048
OF_DENSE_FP8, FROM_K = 0.88, 7168
# Of a training step of a model with mxfp8: the speedup, or the share of the speedup that the table's ceiling allows.
MODELS_TIMES_AS_LONG = {"mixtral-8x7b": 1.4}
MODELS_OF_THE_CEILING = {"deepseek-v3": 0.95, "deepseek-v2-lite": 0.95, "qwen3-30b-a3b": 0.95}
LINEAR_TIMES_AS_LONG, FROM_ROWS = 1.4, 16384
LINEAR_NEVER_SLOWER = {None: 4096, "graph": 2048, "compiled": 2048}
"""Fewest rows from which a dense layer is as fast as `F.linear`, by the launch of both."""
SMALL_TIMES_AS_LONG = 1.0


class Bar(NamedTuple):
    what: str
    required: float
    measured: float
    met: bool

    def __str__(self) -> str:
        return f"{self.what} {self.required:g}: {self.measured:.2f} {'ok' if self.met else 'MISSED'}"


def host_limit(*names: str) -> float:
    """The most host time of an eager op, in us; of several ops on average."""
    outputs = sum(len(OPS[name].outputs) for name in names) / len(names)
    return AT_MOST_US["host_overhead"] + US_PER_OUTPUT * outputs


def _least(row: Mapping[str, Any]) -> float | None:
    """The least ratio of the peer's time to ours."""
    op, peer, case = row["op"], row["peer"], row["case"]
    if peer == "torch_grouped_mm_bf16" and case.get("operands") == "bf16":
        return SMALL_TIMES_AS_LONG
    if op == "grouped_mm_autograd":
        if peer != "torch_grouped_mm_bf16" or case.get("weights") != "held":
            return None
        return AUTOGRAD_TIMES_AS_LONG[case["recipe"]][case["K"] <= SMALL_K]
    return TIMES_AS_LONG.get((op, peer))


def _product_bar(row: Mapping[str, Any]) -> Bar | None:
    if row["op"] == "grouped_mm_fwd" and row["peer"] == "cublas_fp8" and row["case"]["K"] >= FROM_K:
        return Bar("of dense FP8", OF_DENSE_FP8, row["of_roof"], row["of_roof"] >= OF_DENSE_FP8)
    least = _least(row)
    return None if least is None else Bar("x", least, row["ratio"], row["ratio"] >= least)


def _model_bar(row: Mapping[str, Any]) -> Bar | None:
    model = row["case"]["model"]
    if row["case"]["candidate"] != "mxfp8":
        return None
    if least := MODELS_TIMES_AS_LONG.get(model):
        return Bar("x", least, row["ratio"], row["ratio"] >= least)
    of_ceiling = row["ratio"] / row["ceiling"]
    least = MODELS_OF_THE_CEILING.get(model)
    return None if least is None else Bar("of the ceiling", least, of_ceiling, of_ceiling >= least)


def _linear_bar(row: Mapping[str, Any]) -> Bar | None:
    """Of recipe "mxfp8" against `F.linear` that is launched alike."""
    case, peer = row["case"], row["peer"]
    launch = case.get("launch")
    alike = "torch_linear_bf16_compiled" if launch == "compiled" else "torch_linear_bf16"
    if peer != alike or case["recipe"] != "mxfp8" or case["M"] < LINEAR_NEVER_SLOWER[launch]:
        return None
    least = LINEAR_TIMES_AS_LONG if case["M"] >= FROM_ROWS else 1.0
    return Bar("x", least, row["ratio"], row["ratio"] >= least)


def bar(row: Mapping[str, Any]) -> Bar | None:
    """The bar of a line, which depends on its op and its peer; None without one."""
    op, peer = row["op"], row["peer"]
    product = op.startswith("grouped_mm_")
    if peer == "torch_frontend":
        most, over = JAX_PRODUCT_OVER_TORCH if product else JAX_OVER_TORCH, row["us"] / row["peer_us"]
        return Bar("JAX / torch", most, over, over <= most)
    if product:
        return _product_bar(row)
    if op == "model_step":
        return _model_bar(row)
    if op.startswith("linear_"):
        return _linear_bar(row)
    if peer == "copy" and op in OF_A_COPY:
        return Bar("of a copy", OF_A_COPY[op], row["of_roof"], row["of_roof"] >= OF_A_COPY[op])
    if peer == "copy" and op in AT_MOST_US:
        most = host_limit(*row["case"]["ops"].split()) if op == "host_overhead" else AT_MOST_US[op]
        return Bar("us", most, row["us"], row["us"] < most)
    return None
