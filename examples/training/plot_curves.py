"""Plots the runs of a folder and checks that they agree.

    python -m examples.training.plot_curves runs/small      reads runs/small/{torch,jax}-RECIPE/log.jsonl

Writes curves.png to the same folder, prints the comparisons, and exits with 1 if one of them fails:

- PyTorch is within the limit of JAX at every logged step, for each recipe;
- the held-out loss of every recipe is within the limit of bf16, for each framework.

The limit, 0.7% unless given, is a property of the config: it has to cover two runs that differ in the order of
additions alone. Runs of 500 steps on a GPU differ more than runs of 60 steps on a CPU (docs/guides/training.md).

A missing run is an error, and so are runs with different configs or texts.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from mxep.core_kernels.policy.recipe import RECIPES

from .config import LOG_NAME
from .runlog import read_log

FRAMEWORKS = ("torch", "jax")
REFERENCE = "bf16"
COLORS = dict(zip(RECIPES, ("tab:blue", "tab:green", "tab:orange", "tab:red", "tab:purple"), strict=True))
MAY_DIFFER = ("framework", "recipe", "ep", "device")
LIMIT = 0.007
"""Of the comparisons of `make train` the largest is 0.22%, over four seeds 0.38%. A fault in one framework: a router
without a gradient 0.75%, no auxiliary loss 0.80%, rates of 1.05 times 1.5%, one layer's experts frozen 4%."""
Curves = dict[str, dict[int, float]]  # "train" and "eval" -> step -> loss
Runs = dict[tuple[str, str], Curves]  # by framework and recipe


def recipes_in(root: Path) -> list[str]:
    """The reference, and the recipes of which a framework has a run."""
    names = {f"{framework}-{recipe}": recipe for framework in FRAMEWORKS for recipe in RECIPES}
    found = {names[path.name] for path in root.glob("*") if path.name in names}
    return [recipe for recipe in RECIPES if recipe in found | {REFERENCE}]


def read_runs(root: Path) -> Runs:
    """The curves of the runs in `root`: every recipe in both frameworks.

    Raises OSError for a missing run, and ValueError when a log has another framework or recipe than the name of its
    folder, and when two runs differ in more than framework, recipe, device and number of ranks."""
    runs, first = {}, None
    for recipe in recipes_in(root):
        for framework in FRAMEWORKS:
            folder = root / f"{framework}-{recipe}"
            header, *records = read_log(folder) or [{}]
            if header.get("kind") != "run":
                raise ValueError(f"{folder / LOG_NAME} does not begin with a run record")
            for field, expected in (("framework", framework), ("recipe", recipe)):
                if header.get(field) != expected:
                    raise ValueError(f"{folder / LOG_NAME} has {field} {header.get(field)}, expected {expected}")
            config = {k: v for k, v in header.items() if k not in MAY_DIFFER}
            first = first or (folder, config)
            differ = sorted(k for k in config.keys() | first[1].keys() if config.get(k) != first[1].get(k))
            if differ:
                values = ", ".join(f"{k}={first[1].get(k)} and {config.get(k)}" for k in differ)
                raise ValueError(f"{first[0]} and {folder} are runs of different configs: {values}")
            runs[framework, recipe] = {
                kind: {r["step"]: r["loss"] for r in records if r["kind"] == kind} for kind in ("train", "eval")
            }
    return runs


def difference(a: Curves, b: Curves, kind: str) -> tuple[float, int]:
    """The largest relative difference of `a` to `b`, and its step. NaN counts as infinite.

    Raises ValueError when the runs logged different steps."""
    if a[kind].keys() != b[kind].keys() or not a[kind]:
        raise ValueError(f"the runs logged different {kind} steps: {sorted(a[kind])} and {sorted(b[kind])}")
    relative = {step: abs(loss / b[kind][step] - 1) for step, loss in a[kind].items()}
    worst = max(relative, key=lambda step: math.inf if math.isnan(relative[step]) else relative[step])
    return math.inf if math.isnan(relative[worst]) else relative[worst], worst


def compare(runs: Runs, limit: float) -> bool:
    """Print every comparison with its limit. Returns True if all are within it."""
    recipes = list(dict.fromkeys(recipe for _, recipe in runs))
    rows = [
        (f"torch against jax, {recipe}, {kind}", difference(runs["torch", recipe], runs["jax", recipe], kind))
        for recipe in recipes
        for kind in ("train", "eval")
    ] + [
        (
            f"{recipe} against {REFERENCE}, {framework}, eval",
            difference(runs[framework, recipe], runs[framework, REFERENCE], "eval"),
        )
        for recipe in recipes
        if recipe != REFERENCE
        for framework in FRAMEWORKS
    ]
    width = max(len(name) for name, _ in rows)
    for name, (relative, step) in rows:
        verdict = "ok" if relative <= limit else "FAILED"
        print(f"{name:{width}} at most {relative:8.4%} (step {step}), limit {limit:.1%}: {verdict}")
    return all(relative <= limit for _, (relative, _) in rows)


def plot(runs: Runs, limit: float, path: Path) -> None:
    """Top: training losses as lines, held-out losses as markers. Bottom: differences from JAX in bf16, in percent."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    base = runs["jax", REFERENCE]
    for (framework, recipe), curves in runs.items():
        color = COLORS[recipe]
        style, marker = {"torch": ("-", "o"), "jax": ("--", "x")}[framework]
        *_, last = curves["eval"].values()
        label = f"{framework} {recipe}, final held-out loss {last:.4f}"
        losses.plot(curves["train"].keys(), curves["train"].values(), color=color, linestyle=style, label=label)
        losses.plot(curves["eval"].keys(), curves["eval"].values(), color=color, linestyle="", marker=marker)
        for kind, line in (("train", {"linestyle": style}), ("eval", {"linestyle": "", "marker": marker})):
            percent = {step: 100 * (loss / base[kind][step] - 1) for step, loss in curves[kind].items()}
            differences.plot(percent.keys(), percent.values(), color=color, **line)
    losses.set(ylabel="loss, nats per byte", title="Training loss (lines) and held-out loss (markers)")
    losses.legend()
    differences.axhspan(-100 * limit, 100 * limit, color="gray", alpha=0.15)
    differences.set(xlabel="step", ylabel="% from jax bf16\n(gray: within the limit)")
    figure.savefig(path, dpi=120)


def check_limit(flags: argparse.ArgumentParser, limit: float) -> None:
    if not 0 < limit < 1:
        flags.error(f"--limit: got {limit}; allowed: a share between 0 and 1")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="examples.training.plot_curves", description="Compare and draw the runs of a folder."
    )
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SHARE", help="largest relative difference of two losses"
    )
    args = parser.parse_args(argv)
    folder, limit = args.runs, args.limit
    check_limit(parser, limit)
    try:
        runs = read_runs(folder)
        agree = compare(runs, limit)
    except (OSError, ValueError) as error:
        sys.exit(f"plot_curves: error: {error}")
    plot(runs, limit, folder / "curves.png")
    print(f"wrote {folder / 'curves.png'}")
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
