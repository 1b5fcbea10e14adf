"""The README's chart: the MoE layer in plain bf16, in the best bf16 and in MXFP8, in back-to-back steps.

lines of h200.jsonl --one commit--> Size: milliseconds, peak GiB and joules of each side --> headline.svg

A side, or a panel, appears when its lines are stored.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from .picture import REPRODUCIBLE, save
from .results import RESULTS
from .speed import Row, bf16_layers, layers, sizes_of

PICTURE = RESULTS / "headline.svg"
SIDES = {"plain bf16": "#9aa5b1", "best bf16": "#4c7bb5", "mxep, MXFP8": "#d9622b"}


class Side(NamedTuple):
    """Of a step: milliseconds; peak memory in GiB and joules, None where not stored."""

    ms: float
    gib: float | None
    joules: float | None


PANELS: dict[str, Callable[[Side], float | None]] = {
    "time of a step, ms": lambda side: side.ms,
    "peak memory, GiB": lambda side: side.gib,
    "energy of a step, J": lambda side: side.joules,
}


def _gib(nbytes: int | None) -> float | None:
    return nbytes / 2**30 if nbytes else None


def _peer(row: Row) -> Side:
    return Side(row["peer_us"] / 1e3, _gib(row.get("peer_peak_nbytes")), row.get("peer_joules"))


def sides(row: Row, rows: Sequence[Row]) -> dict[str, Side]:
    """The sides of a size: row, its line against plain bf16, and all lines. Best bf16 is the fastest of the peers in
    bf16, where another than the plain one is stored."""
    peers = bf16_layers(row, rows)
    best = {"best bf16": _peer(min(peers, key=lambda peer: peer["peer_us"]))} if len(peers) > 1 else {}
    ours = Side(row["us"] / 1e3, _gib(row["peak_nbytes"]), row.get("joules"))
    return {"plain bf16": _peer(row), **best, "mxep, MXFP8": ours}


def _panel(axes: Any, title: str, of_size: Mapping[str, Mapping[str, float]]) -> None:
    """Bars relative to plain bf16, with the absolute value above each."""
    names = [name for name in SIDES if any(name in values for values in of_size.values())]
    width = 0.84 / len(names)
    for at, values in enumerate(of_size.values()):
        for i, name in enumerate(names):
            if name in values:
                height, x = values[name] / values["plain bf16"], at + (i - (len(names) - 1) / 2) * width
                axes.bar(x, height, 0.94 * width, color=SIDES[name], label=name if at == 0 else None)
                axes.text(x, height + 0.015, f"{values[name]:.3g}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(of_size)), list(of_size), fontsize=7)
    axes.set_title(title, fontsize=9)
    axes.set_yticks([0, 0.5, 1])
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the chart of these lines as SVG or PNG. Raises ValueError without a layer."""
    of_layers = layers(rows)
    if not of_layers:
        raise ValueError("headline: rows: got no line of a layer; expected moe_layer_fwd_bwd in back-to-back steps")
    found = {f"{d}/{f}\n{e} experts, top-{k}\n{t} tokens": sides(row, rows)
             for row in of_layers for t, d, f, e, k in [sizes_of(row["case"])]}  # fmt: skip
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for title, value in PANELS.items():
        values = {size: {name: amount for name, side in of.items() if (amount := value(side)) is not None}
                  for size, of in found.items()}  # fmt: skip
        if all("plain bf16" in of and len(of) > 1 for of in values.values()):
            panels[title] = values
    one = of_layers[0]
    with rc_context(REPRODUCIBLE):
        figure = Figure(figsize=(5.2 * len(panels), 3.4), layout="constrained")
        for axes, (title, values) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            _panel(axes, title, values)
        figure.axes[0].set_ylabel("relative to plain bf16", fontsize=8)
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, fontsize=8, loc="outside lower center", ncols=len(SIDES), frameon=False)
        figure.suptitle(
            f"MoE layer, forward and backward, back-to-back steps: {one['hardware']}, commit {one['commit'][:7]} of "
            f"{one['date']}",
            fontsize=9,
        )
        save(figure, path)
