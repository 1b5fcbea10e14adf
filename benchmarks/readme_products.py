"""The README's table of the grouped products on a GPU, and the picture below it."""

from pathlib import Path
from typing import Any

from .bars import FROM_K, JAX_PRODUCT_OVER_TORCH, OF_DENSE_FP8, bar
from .results import RESULTS

Row = dict[str, Any]
PICTURE = RESULTS / "h200_products.svg"
# Grouped FP8 products of another package on another card, "contiguous layout", TFLOPS, as published: the README of
# DeepGEMM at the last commit that lists them.
DEEPGEMM_H800_TFLOPS = (1214, 1346)
DEEPGEMM_SOURCE = "https://github.com/deepseek-ai/DeepGEMM/blob/55ab91f72f76e8a6db0e86282c3169a88d93df1b/README.md"

COLUMNS = ("product", "shape", "kernel", "ms (spread)", "TF/s", "of dense FP8", "`torch._grouped_mm` bf16 takes",
           "`torch._scaled_grouped_mm` takes", "`jax.lax.ragged_dot` bf16 takes", "JAX / torch")  # fmt: skip
NAMES = {
    "grouped_mm_fwd": "forward, folded",
    "grouped_mm_dgrad": "input gradient, folded",
    "grouped_mm_wgrad": "weight gradient, folded",
    "grouped_mm_exact": "forward, exact",
    "grouped_mm_autograd": "forward and both gradients",
}


def is_product(op: str) -> bool:
    return op in NAMES


def _shape(row: Row) -> str:
    return ", ".join(f"{k} {v}" for k, v in row["case"].items() if k not in ("implementation", "recipe"))


def _held(text: str, row: Row) -> str:
    """The text with what its bar requires."""
    held_to = bar(row)
    return text if held_to is None else f"{text} ({held_to.required:g}){'' if held_to.met else ' **missed**'}"


def _measured(rows: list[Row]) -> bool:
    """Whether torch's time is there: a failure may have left JAX's alone."""
    return any(row["frontend"] == "torch" for row in rows)


def _cells(rows: list[Row]) -> tuple[str, ...]:
    by = {(row["frontend"], row["peer"]): row for row in rows}
    ours = next(row for row in rows if row["frontend"] == "torch")
    recipe = ours["case"].get("recipe")

    def takes(frontend: str, peer: str) -> str:
        row = by.get((frontend, peer))
        return _held(f"{row['ratio']:.2f}x", row) if row else ""

    dense, jax = by.get(("torch", "cublas_fp8")), by.get(("jax", "torch_frontend"))
    return (
        NAMES[ours["op"]] + (f", recipe `{recipe}`" if recipe else ""),
        _shape(ours),
        ours["case"]["implementation"].split(",")[0],
        f"{ours['us'] / 1e3:.3f} ({ours['spread']:.0%})",
        f"{ours['flops'] / ours['us'] / 1e6:.0f}",
        _held(f"{dense['of_roof']:.2f}", dense) if dense else "",
        takes("torch", "torch_grouped_mm_bf16"),
        takes("torch", "torch_scaled_grouped_mm"),
        takes("jax", "jax_ragged_dot_bf16"),
        _held(f"{jax['us'] / jax['peer_us']:.2f}", jax) if jax else "",
    )


def _small(rows: list[Row]) -> str:
    """From how many rows on a small product is not slower than torch's, for each of its weights."""
    weights: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["case"].get("operands") == "bf16" and row["peer"] == "torch_grouped_mm_bf16":
            case = row["case"]
            weights.setdefault(f"G {case['G']}, K {case['K']}, N {case['N']}", {})[case["M"]] = row["ratio"]
    said = []
    for name, ratios in weights.items():
        enough = [m for m, ratio in ratios.items() if ratio >= 1]
        said.append(f"{name}: {f'from {min(enough)} rows on' if enough else f'slower at {max(ratios)} rows'}")
    return f"Not slower than `torch._grouped_mm` bf16, quantization included: {'; '.join(said)}." if said else ""


def products(rows: list[Row], picture: Path = PICTURE) -> str:
    """The markdown; "" without lines."""
    if not rows:
        return ""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"] + row["case"].get("recipe", ""), _shape(row)), []).append(row)
    low, high = DEEPGEMM_H800_TFLOPS
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    lines = [
        f"Grouped products, {rows[0]['hardware']}, {versions}; medians of one run, errors checked in fp64 before.",
        f"Of dense FP8: of cuBLAS's rate with fast accumulation at the same K; {OF_DENSE_FP8} required from K {FROM_K} "
        f"on. Takes: its time in ours, at least that in brackets.\nJAX / torch: at most {JAX_PRODUCT_OVER_TORCH}. "
        f"With `operands bf16` the activations are quantized within the time, and in the gradients' lines everything; "
        f"but weights that are held.\n"
        f"Published, not measured here: DeepGEMM's grouped FP8 products on an H800, {low} to {high} TF/s "
        f"([source]({DEEPGEMM_SOURCE})).",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(of_one))} |" for of_one in groups.values() if _measured(of_one)),
    ]
    if small := _small(rows):
        lines += ["", small]
    lines += ["", f"![Roofline of the grouped products](benchmarks/results/{picture.name})"]
    return "\n".join(lines)
