"""The table of the grouped GEMMs on a GPU, the break-even sizes, and the roofline picture."""

from pathlib import Path
from typing import Any

from ..results import RESULTS
from .table_ops import machine

Row = dict[str, Any]
PICTURE = RESULTS / "h200_products.svg"

COLUMNS = ("GEMM", "shape", "kernel", "time in ms (spread)", "TF/s", "of dense FP8",
           "`torch._grouped_mm` bf16 / mxep", "`torch._scaled_grouped_mm` / mxep",
           "`jax.lax.ragged_dot` bf16 / mxep", "JAX / torch")  # fmt: skip
NAMES = {
    "grouped_mm_fwd": "forward, folded",
    "grouped_mm_dgrad": "input gradient, folded",
    "grouped_mm_wgrad": "weight gradient, folded",
    "grouped_mm_exact": "forward, exact",
    "grouped_mm_autograd": "forward and both gradients",
}


def is_product(op: str) -> bool:
    return op in NAMES


def shape_of(row: Row) -> str:
    case = {**row["case"], **({"weights": "cached"} if row["case"].get("weights") == "held" else {})}
    return ", ".join(f"{k} {v}" for k, v in case.items() if k not in ("implementation", "recipe"))


def _measured(rows: list[Row]) -> bool:
    """Whether torch was measured: after a failure only JAX's lines may exist."""
    return any(row["frontend"] == "torch" for row in rows)


def _cells(rows: list[Row]) -> tuple[str, ...]:
    by = {(row["frontend"], row["peer"]): row for row in rows}
    ours = next(row for row in rows if row["frontend"] == "torch")
    recipe = ours["case"].get("recipe")

    def ratio(frontend: str, peer: str) -> str:
        row = by.get((frontend, peer))
        return f"{row['ratio']:.2f}x" if row else ""

    dense, jax = by.get(("torch", "cublas_fp8")), by.get(("jax", "torch_frontend"))
    return (
        NAMES[ours["op"]] + (f", recipe `{recipe}`" if recipe else ""),
        shape_of(ours),
        ours["case"]["implementation"].split(",")[0],
        f"{ours['us'] / 1e3:.3f} ({ours['spread']:.0%})",
        f"{ours['flops'] / ours['us'] / 1e6:.0f}",
        f"{dense['of_roof']:.2f}" if dense else "",
        ratio("torch", "torch_grouped_mm_bf16"),
        ratio("torch", "torch_scaled_grouped_mm"),
        ratio("jax", "jax_ragged_dot_bf16"),
        f"{jax['us'] / jax['peer_us']:.2f}" if jax else "",
    )


def _break_even(rows: list[Row]) -> list[str]:
    """A table of the least rows at which a small GEMM, its quantization included, is as fast as torch's in bf16."""
    weights: dict[tuple[int, int, int], dict[int, float]] = {}
    for row in rows:
        if row["case"].get("operands") == "bf16" and row["peer"] == "torch_grouped_mm_bf16":
            case = row["case"]
            weights.setdefault((case["G"], case["K"], case["N"]), {})[case["M"]] = row["ratio"]
    if not weights:
        return []
    lines = [
        "",
        "Fewest measured rows at which the forward GEMM, with the quantization of its rows, is not slower than "
        "`torch._grouped_mm` in bf16:",
        "",
        "| G | K | N | rows |",
        "| --- | --- | --- | --- |",
    ]
    for (g, k, n), ratios in weights.items():
        enough = [m for m, ratio in ratios.items() if ratio >= 1]
        lines.append(f"| {g} | {k} | {n} | {min(enough) if enough else f'more than {max(ratios)}'} |")
    return lines


def table(rows: list[Row], picture: Path = PICTURE) -> str:
    """The section with both tables and the picture; "" without lines."""
    if not rows:
        return ""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"] + row["case"].get("recipe", ""), shape_of(row)), []).append(row)
    lines = [
        "## Grouped GEMMs, on a GPU",
        "",
        f"{machine(rows)}. Times are medians of single calls of one run, with cold caches. Errors are checked in "
        "fp64 before timing.",
        "",
        "- *of dense FP8*: rate of mxep divided by the rate of cuBLAS's dense FP8 GEMM with fast accumulation at the "
        "same K. Above 1 mxep is faster.",
        "- *peer / mxep*: time of the peer divided by the time of mxep. Above 1 mxep is faster.",
        "- *JAX / torch*: time of mxep in JAX divided by its time in torch, both back to back. Above 1 JAX is slower.",
        "- *`jax.lax.ragged_dot`*: XLA writes dense operands for it, so this baseline is slow.",
        "- Rows with `operands bf16` include the quantization of the activations. Rows with both gradients include the "
        "quantization of activations, gradients and weights. Rows with `weights cached` omit the weights.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(of_one))} |" for of_one in groups.values() if _measured(of_one)),
        *_break_even(rows),
        "",
        f"![Roofline of the grouped GEMMs](../../benchmarks/results/{picture.name})",
    ]
    return "\n".join(lines)
