"""Four runs in one picture, and whether they agree.

    python -m examples.plot_curves runs/small      reads runs/small/{torch,jax}-{bf16,mxfp8}/log.jsonl

Writes curves.png there, prints the two comparisons, and exits with 1 when one of them fails:
PyTorch within 1% of JAX at every logged step, for each precision; the held-out loss of MXFP8 within
1% of bf16, for each framework. Runs of different configs or texts are not compared: that is an error.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from .config import LOG_NAME
from .runlog import read_log

FRAMEWORKS = ("torch", "jax")
PRECISIONS = ("bf16", "mxfp8")
LIMIT = 0.01
Curves = dict[str, dict[int, float]]  # "train" and "eval" -> step -> loss


def read_runs(root: Path) -> dict[tuple[str, str], Curves]:
    """The curves of the four runs in `root`. Raises ValueError when a log is not of the run its folder names,
    and when two runs differ in more than framework, precision and number of ranks."""
    runs, first = {}, None
    for precision in PRECISIONS:
        for framework in FRAMEWORKS:
            folder = root / f"{framework}-{precision}"
            header, *records = read_log(folder) or [{}]
            if header.get("kind") != "run":
                raise ValueError(f"{folder / LOG_NAME} does not begin with the record of its run")
            for field, expected in (("framework", framework), ("precision", precision)):
                if header.get(field) != expected:
                    raise ValueError(f"{folder / LOG_NAME} is of a run with {field} {header.get(field)}")
            config = {k: v for k, v in header.items() if k not in ("framework", "precision", "ep")}
            first = first or (folder, config)
            differ = sorted(k for k in config.keys() | first[1].keys() if config.get(k) != first[1].get(k))
            if differ:
                values = ", ".join(f"{k}={first[1].get(k)} and {config.get(k)}" for k in differ)
                raise ValueError(f"{first[0]} and {folder} are runs of different configs: {values}")
            runs[framework, precision] = {
                kind: {r["step"]: r["loss"] for r in records if r["kind"] == kind} for kind in ("train", "eval")
            }
    return runs


def difference(a: Curves, b: Curves, kind: str) -> tuple[float, int]:
    """The largest relative difference of `a` to `b` and the step where it is; a loss that is not a
    number is infinitely far. Raises ValueError when the two runs did not log the same steps."""
    if a[kind].keys() != b[kind].keys() or not a[kind]:
        raise ValueError(f"the runs logged different {kind} steps: {sorted(a[kind])} and {sorted(b[kind])}")
    relative = {step: abs(loss / b[kind][step] - 1) for step, loss in a[kind].items()}
    worst = max(relative, key=lambda step: math.inf if math.isnan(relative[step]) else relative[step])
    return math.inf if math.isnan(relative[worst]) else relative[worst], worst


def compare(runs: dict[tuple[str, str], Curves]) -> bool:
    """Print every comparison against its limit. Returns whether all hold."""
    rows = [
        (f"torch against jax, {precision}, {kind}", difference(runs["torch", precision], runs["jax", precision], kind))
        for precision in PRECISIONS
        for kind in ("train", "eval")
    ] + [
        (
            f"mxfp8 against bf16, {framework}, eval",
            difference(runs[framework, "mxfp8"], runs[framework, "bf16"], "eval"),
        )
        for framework in FRAMEWORKS
    ]
    for name, (relative, step) in rows:
        verdict = "ok" if relative <= LIMIT else "FAILED"
        print(f"{name:34} at most {relative:8.4%} (step {step}), limit {LIMIT:.0%}: {verdict}")
    return all(relative <= LIMIT for _, (relative, _) in rows)


def plot(runs: dict[tuple[str, str], Curves], path: Path) -> None:
    """Training losses as lines and held-out losses as marks; below, how far each is from JAX in bf16."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    base = runs["jax", "bf16"]
    for (framework, precision), curves in runs.items():
        color = {"bf16": "tab:blue", "mxfp8": "tab:orange"}[precision]
        style, mark = {"torch": ("-", "o"), "jax": ("--", "x")}[framework]
        *_, last = curves["eval"].values()
        label = f"{framework} {precision}, held out at the end {last:.4f}"
        losses.plot(curves["train"].keys(), curves["train"].values(), color=color, linestyle=style, label=label)
        losses.plot(curves["eval"].keys(), curves["eval"].values(), color=color, linestyle="", marker=mark)
        for kind, line in (("train", {"linestyle": style}), ("eval", {"linestyle": "", "marker": mark})):
            percent = {step: 100 * (loss / base[kind][step] - 1) for step, loss in curves[kind].items()}
            differences.plot(percent.keys(), percent.values(), color=color, **line)
    losses.set(ylabel="loss, nats per byte", title="Training (lines) and held-out loss (marks)")
    losses.legend()
    differences.axhspan(-100 * LIMIT, 100 * LIMIT, color="gray", alpha=0.15)
    differences.set(xlabel="step", ylabel="% from jax bf16")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="examples.plot_curves", description="Compare and draw four runs.")
    parser.add_argument("runs", type=Path, help="the folder that holds the four runs")
    folder = parser.parse_args(argv).runs
    try:
        runs = read_runs(folder)
        agree = compare(runs)
    except (OSError, ValueError) as error:
        sys.exit(f"plot_curves: error: {error}")
    plot(runs, folder / "curves.png")
    print(f"wrote {folder / 'curves.png'}")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
