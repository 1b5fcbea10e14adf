"""The README's table: the time of bf16 in torch and JAX, and ours, at one shape of the recorded lines."""

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]
SHAPE = {"M": 131072, "K": 7168, "N": 2048, "G": 8, "routing": "balanced"}
"""131072 rows, 8 experts of 7168 x 2048: one rank's share of a layer as large as DeepSeek-V3's."""
LAYER = {"tokens": 16384, "dim": 7168, "hidden_dim": 2048, "num_experts": 32, "top_k": 8}


def _at(shape: Mapping[str, object], **more: object) -> Callable[[Row], bool]:
    wanted = {**shape, **more}
    return lambda row: {k: v for k, v in row["case"].items() if k != "implementation"} == wanted


ROWS = (
    ("Grouped GEMM, forward", "grouped_mm_fwd", "torch", "torch_grouped_mm_bf16", "`torch._grouped_mm`", _at(SHAPE)),
    ("Grouped GEMM, forward, in JAX", "grouped_mm_fwd", "jax", "jax_ragged_dot_bf16", "`jax.lax.ragged_dot`",
     _at(SHAPE)),
    ("Grouped GEMM, weight gradient", "grouped_mm_wgrad", "torch", "torch_grouped_mm_bf16", "`torch._grouped_mm`",
     _at(SHAPE)),
    ("Forward and both gradients, all quantization included", "grouped_mm_autograd", "torch", "torch_grouped_mm_bf16",
     "`torch._grouped_mm`", _at(SHAPE, recipe="mxfp8")),
    ("MoE layer (16384 tokens, 32 experts, top 8), forward and backward", "moe_layer_fwd_bwd", "torch",
     "plain_torch_bf16",
     "plain PyTorch layer", _at(LAYER, recipe="mxfp8")),
)  # fmt: skip


def table(rows: list[Row]) -> str:
    """One row per comparison that was measured."""
    lines = ["| | bf16 | MXFP8, ours | speed-up |", "| --- | --- | --- | --- |"]
    for what, op, frontend, peer, name, wanted in ROWS:
        for row in rows:
            if (row["op"], row["frontend"], row["peer"]) == (op, frontend, peer) and wanted(row):
                bf16, ours = (f"{us / 1e3:.1f} ms" for us in (row["peer_us"], row["us"]))
                lines.append(f"| {what} | {bf16}, {name} | {ours} | {row['ratio']:.2f}x |")
    m, k, n, g = (SHAPE[name] for name in "MKNG")
    run = rows[0]
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "jax"))
    return "\n".join([
        *lines,
        "",
        f"{run['hardware']}, {versions}. Grouped GEMM: {m} rows, {g} experts, K {k}, N {n}. Medians; the two times of "
        "a row are taken in turns.",
    ])  # fmt: skip
