"""`python -m benchmarks.figures.roofline [h200]`: the roofline picture of the grouped GEMMs.

results/h200.jsonl --> FLOP per byte of the least traffic (x), TF/s (y) --> results/h200_products.svg

The roofs are measured in the same run: the slope is a device copy, the ceilings are cuBLAS's fastest dense GEMMs.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from mxep.core_kernels.launch import fail

from .picture import REPRODUCIBLE, save
from .results import RESULTS, newest
from .tables.table_grouped_gemm import NAMES, is_product

Row = dict[str, Any]
CEILINGS = {"FP8": "cublas_fp8", "bf16": "cublas_bf16"}
# Peer -> bytes per element of its operands.
PEERS = {"torch_grouped_mm_bf16": 2, "torch_scaled_grouped_mm": 1}
COLORS = {"mxep": "tab:red", "torch_grouped_mm_bf16": "tab:blue", "torch_scaled_grouped_mm": "tab:green"}
MARKS = dict(zip(NAMES, ("o", "v", "s", "D", "P"), strict=True))


class Point(NamedTuple):
    source: str
    op: str
    intensity: float
    tflops: float


class Roofs(NamedTuple):
    """Bytes per second of a device copy; TF/s of the fastest dense product, by name."""

    nbytes_per_s: float
    ceilings: Mapping[str, float]


def roofs(rows: list[Row]) -> Roofs:
    """The roofs, from the lines with a dense product or a copy as peer. Raises ValueError if one of them is missing."""
    rates = {
        name: [r["flops"] / r["peer_us"] / 1e6 for r in rows if r["peer"] == peer] for name, peer in CEILINGS.items()
    }
    copies = [r["nbytes"] / r["peer_us"] * 1e6 for r in rows if r["peer"] == "copy"]
    if missing := [*(name for name, of_one in rates.items() if not of_one), *([] if copies else ["copy"])]:
        allowed = "allowed: lines with each as peer; run python -m benchmarks gpu"
        fail(ValueError, "roofline", "rows", f"no line for {', '.join(missing)}", allowed)
    return Roofs(median(copies), {name: max(of_one) for name, of_one in rates.items()})


def _peer_nbytes(row: Row) -> int:
    """The least traffic of the peer: operands in its dtype and a bf16 output, of the shapes x, w, out."""
    m, n, k, g = (row["case"][name] for name in "MNKG")
    shapes = {"x": m * k, "w": g * n * k, "out": m * n}
    written = {"grouped_mm_dgrad": "x", "grouped_mm_wgrad": "w"}.get(row["op"], "out")
    if row["op"] == "grouped_mm_autograd":
        return 2 * 2 * sum(shapes.values())  # each is read once and written once
    return sum(size * (2 if name == written else PEERS[row["peer"]]) for name, size in shapes.items())


def points(rows: list[Row]) -> list[Point]:
    """One point per case for ours and for each of its peers."""
    found: dict[tuple[str, ...], Point] = {}
    for row in rows:
        if row["frontend"] != "torch":
            continue
        op, case = row["op"], str(row["case"])
        found[op, case, "mxep"] = Point("mxep", op, row["flops"] / row["nbytes"], row["flops"] / row["us"] / 1e6)
        if row["peer"] in PEERS and op != "grouped_mm_exact":  # the forward product has the same peers
            intensity, tflops = row["flops"] / _peer_nbytes(row), row["flops"] / row["peer_us"] / 1e6
            found[op, case, row["peer"]] = Point(row["peer"], op, intensity, tflops)
    return list(found.values())


def _label(source: str, op: str) -> str:
    """Name of a series; a peer's product is not folded."""
    return NAMES[op] if source == "mxep" else NAMES[op].split(",")[0]


def draw(rows: list[Row], path: Path) -> None:
    """Write the picture of these lines, SVG or PNG after the path's ending. Raises ValueError without roofs."""
    slope, ceilings = roofs(rows)
    shown = points(rows)
    with rc_context(REPRODUCIBLE):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        ridge = min(ceilings.values()) * 1e12 / slope
        x = np.geomspace(min(ridge, *(p.intensity for p in shown)) / 4, max(p.intensity for p in shown) * 2, 400)
        for (name, ceiling), style in zip(ceilings.items(), ("-", "--"), strict=True):
            axes.plot(x, np.minimum(slope * x / 1e12, ceiling), color="black", linestyle=style, linewidth=1,
                      label=f"dense {name}, cuBLAS: {ceiling:.0f} TF/s; copy: {slope / 1e9:.0f} GB/s")  # fmt: skip
        for source, op in dict.fromkeys((p.source, p.op) for p in shown):
            of_one = [p for p in shown if (p.source, p.op) == (source, op)]
            axes.plot([p.intensity for p in of_one], [p.tflops for p in of_one], linestyle="", marker=MARKS[op],
                      color=COLORS[source], alpha=0.8, label=f"{source}: {_label(source, op)}")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of the least traffic", ylabel="TF/s",
                 title=f"Grouped GEMMs, {rows[0]['hardware']}, commit {rows[0]['commit'][:7]}")  # fmt: skip
        axes.grid(which="both", alpha=0.2)
        axes.legend(fontsize="x-small", loc="lower right")
        save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures.roofline", description="Draw the roofline.")
    parser.add_argument("name", nargs="?", default="h200", help="results/<name>.jsonl")
    parser.add_argument("--out", type=Path, help="an .svg or .png instead of results/<name>_products.svg")
    args = parser.parse_args()
    rows = newest(args.name, is_product)
    if not rows:
        parser.error(f"name: results/{args.name}.jsonl has no lines of grouped products")
    path = args.out or RESULTS / f"{args.name}_products.svg"
    draw(rows, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
