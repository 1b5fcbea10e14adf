"""The README's chart of training: held-out loss of six seeds in bf16 and in MXFP8, from h200_curves/seeds.jsonl."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from .picture import REPRODUCIBLE, save
from .results import RESULTS

RUNS = RESULTS / "h200_curves" / "seeds.jsonl"
PICTURE = RESULTS / "h200_curves" / "seeds.svg"
COLORS = {"bf16": "#4c7bb5", "mxfp8": "#d9622b"}
FROM_STEP = 100  # before it the loss falls from 5.8, and no difference is visible


def runs() -> list[dict[str, Any]]:
    return [json.loads(text) for text in RUNS.read_text().splitlines()]


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the chart as SVG or PNG: mean, and the range of the seeds."""
    with rc_context(REPRODUCIBLE):
        figure = Figure(figsize=(5.6, 3), layout="constrained")
        axes = figure.subplots()
        for recipe, color in COLORS.items():
            of_one = [run for run in found if run["recipe"] == recipe]
            steps = np.array(of_one[0]["eval_steps"])
            loss, shown = np.array([run["eval_loss"] for run in of_one]), steps >= FROM_STEP
            mean, low, high = (f(loss, axis=0)[shown] for f in (np.mean, np.min, np.max))
            axes.plot(steps[shown], mean, color=color, marker="o", markersize=3,
                      label=f"{recipe}: mean of {len(of_one)} seeds, ends at {mean[-1]:.3f}")  # fmt: skip
            axes.fill_between(steps[shown], low, high, color=color, alpha=0.2, linewidth=0)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel("held-out loss, range of the seeds", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_title(f"{found[0]['device']}, commit {found[0]['commit']}, 219M weights", fontsize=9)
        axes.legend(fontsize=7)
        save(figure, path)
