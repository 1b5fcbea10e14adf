"""`python -m benchmarks.roofline [h200]`: what the grouped products reach below the roofs of the same run.

results/h200.jsonl --> intensity, FLOP per byte of the least traffic (x), TF/s (y) --> results/h200_products.svg

Roofs are measured: the slope is a device copy, the two ceilings are cuBLAS's fastest dense products.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from .readme_products import NAMES, is_product
from .results import RESULTS, newest

Row = dict[str, Any]
CEILINGS = {"FP8": "cublas_fp8", "bf16": "cublas_bf16"}
# Peer -> bytes of an element of its operands.
PEERS = {"torch_grouped_mm_bf16": 2, "torch_scaled_grouped_mm": 1}
COLORS = {"mxep": "tab:red", "torch_grouped_mm_bf16": "tab:blue", "torch_scaled_grouped_mm": "tab:green"}
MARKS = dict(zip(NAMES, ("o", "v", "s", "D", "P"), strict=True))
# Ids inside an SVG are random and the date is today's: without these one figure would be another file each time.
REPRODUCIBLE: dict[Any, Any] = {"svg.hashsalt": "mxep", "svg.fonttype": "none"}


class Point(NamedTuple):
    who: str
    op: str
    intensity: float
    tflops: float


class Roofs(NamedTuple):
    """nbytes_per_s of a copy; TF/s by name, the fastest of the run."""

    nbytes_per_s: float
    ceilings: Mapping[str, float]


def roofs(rows: list[Row]) -> Roofs:
    """Of the lines with a dense product or a copy as peer. Raises ValueError where one of the three is missing."""
    rates = {
        name: [r["flops"] / r["peer_us"] / 1e6 for r in rows if r["peer"] == peer] for name, peer in CEILINGS.items()
    }
    copies = [r["nbytes"] / r["peer_us"] * 1e6 for r in rows if r["peer"] == "copy"]
    if missing := [*(name for name, of_one in rates.items() if not of_one), *([] if copies else ["copy"])]:
        raise ValueError(f"roofline: roofs: no line for {', '.join(missing)}; run python -m benchmarks gpu")
    return Roofs(median(copies), {name: max(of_one) for name, of_one in rates.items()})


def _peer_nbytes(row: Row) -> int:
    """Operands in the peer's type, an output of bf16: whichever product, x, w and its gradient's shapes take part."""
    m, n, k, g = (row["case"][name] for name in "MNKG")
    shapes = {"x": m * k, "w": g * n * k, "out": m * n}
    written = {"grouped_mm_dgrad": "x", "grouped_mm_wgrad": "w"}.get(row["op"], "out")
    if row["op"] == "grouped_mm_autograd":
        return 2 * 2 * sum(shapes.values())  # each is read once and written once
    return sum(size * (2 if name == written else PEERS[row["peer"]]) for name, size in shapes.items())


def points(rows: list[Row]) -> list[Point]:
    """Ours once for each case, and its peers."""
    found: dict[tuple[str, ...], Point] = {}
    for row in rows:
        if row["frontend"] != "torch":
            continue
        op, case = row["op"], str(row["case"])
        found[op, case, "mxep"] = Point("mxep", op, row["flops"] / row["nbytes"], row["flops"] / row["us"] / 1e6)
        if row["peer"] in PEERS and op != "grouped_mm_exact":  # the peers of the other forward product
            intensity, tflops = row["flops"] / _peer_nbytes(row), row["flops"] / row["peer_us"] / 1e6
            found[op, case, row["peer"]] = Point(row["peer"], op, intensity, tflops)
    return list(found.values())


def _label(who: str, op: str) -> str:
    """A peer folds nothing."""
    return NAMES[op] if who == "mxep" else NAMES[op].split(",")[0]


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
        for who, op in dict.fromkeys((p.who, p.op) for p in shown):
            of_one = [p for p in shown if (p.who, p.op) == (who, op)]
            axes.plot([p.intensity for p in of_one], [p.tflops for p in of_one], linestyle="", marker=MARKS[op],
                      color=COLORS[who], alpha=0.8, label=f"{who}: {_label(who, op)}")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of the least traffic", ylabel="TF/s",
                 title=f"Grouped products, {rows[0]['hardware']}, commit {rows[0]['commit'][:7]}")  # fmt: skip
        axes.grid(which="both", alpha=0.2)
        axes.legend(fontsize="x-small", loc="lower right")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description="Draw the grouped products.")
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
