"""`python -m benchmarks.figures.ep_scale`: a performance model of expert parallelism at scale; the tables and the
picture of docs/design/ep_scale.md.

ep_rates.py --measured rates--> benchmarks/ep_model.py --> tables, results/h200_ep_scale.svg
            --measured and modelled times--> tables
"""

from pathlib import Path

from mxep.core_kernels.cases import TIMED_LAYER
from mxep.core_kernels.grouped_gemm.cases import TIMED
from mxep.core_kernels.policy.deduplicate import CHOICES
from mxep.core_kernels.policy.recipe import Recipe

from ..ep_model import (
    Case,
    Direction,
    Send,
    backward,
    distinct,
    fitted,
    forward,
    in_turn,
    overlapped,
    plain,
    token_bytes,
)
from .ep_rates import GPU_BOUND, GPUS, measured, rates, reckoned, wire_of_chunks
from .results import RESULTS, newest

PICTURE = RESULTS / "h200_ep_scale.svg"
COUNT = 0.08e-6
"""Seconds of the host per entry of the table of counts: `plan_exchange` of 64 ranks and 256 experts takes 1.3 ms."""
TRANSFERS = ("dispatch", "dispatch_grad", "combine", "combine_grad")
RECIPES = {
    "`mxfp8`": Recipe.parse("mxfp8"),
    "`mxfp8`, four MXFP8 all-to-alls": Recipe.parse("mxfp8", mxfp8_all_to_all=TRANSFERS),
    "`mxfp8_wgrad_with_hp`": Recipe.parse("mxfp8_wgrad_with_hp"),
}
WIRES = {
    "bf16": Recipe.parse("bf16"),
    "MXFP8 to the experts, bf16 back": Recipe.parse("mxfp8"),
    "MXFP8": Recipe.parse("mxfp8", mxfp8_all_to_all=TRANSFERS),
}
SHAPES = tuple((p.K, p.N) for p in TIMED if p.routing == "balanced")
ROWS, TOP_K, EXPERTS = TIMED_LAYER.tokens, TIMED_LAYER.top_k, TIMED_LAYER.num_experts
SENDS: tuple[Send, ...] = ("each", "summed", "host")
BOUNDS = {"wire": "all-to-all", "products": "GEMMs", "host": "CPU"}
SCALES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def case_of(dim: int, hidden: int, ranks: int, recipe: Recipe, send: Send) -> Case:
    """131072 rows per rank, of eight per token; 256 experts, or one per rank if there are more ranks."""
    return Case(ranks, ROWS, dim, hidden, max(EXPERTS // ranks, 1), recipe, TOP_K, send)


def directions(case: Case) -> tuple[Direction, Direction]:
    """Forward and backward with the faster transport."""
    engines = rates(case.dim, case.hidden, case.ranks)
    both = [(forward(case, r), backward(case, r)) for r in (engines, engines._replace(copies=engines.collectives))]
    return min(both, key=lambda of: sum(map(overlapped, of)))


def exposed(both: tuple[Direction, Direction]) -> float:
    """The share of the overlapped time in which products and passes wait."""
    total = sum(map(overlapped, both))
    return 1 - sum(d.local for d in both) / total


def hidden_up_to(dim: int, hidden: int, recipe: Recipe, send: Send) -> int:
    """The largest scale up to which, and at which, at most a tenth of the time is exposed; 0 if there is none."""
    within = [exposed(directions(case_of(dim, hidden, ranks, recipe, send))) <= 0.1 for ranks in SCALES]
    return ([0, *SCALES])[within.index(False) if False in within else len(SCALES)]


def _table(head: str, rows: list[tuple[str, ...]]) -> list[str]:
    columns = head.split(" | ")
    return [f"| {head} |", f"|{' --- |' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _beside_measured() -> list[str]:
    recorded = list(newest("h200_ep", lambda op: op in ("ep_fwd", "ep_fwd_bwd")))
    found, unhidden = list(measured(recorded)), {}
    chunks = {ranks: wire_of_chunks(recorded, ranks) for ranks in {m.case.ranks for m in found}}
    for how in ("collectives", "copy engines"):
        runs = [
            (m.milliseconds[1], *(reckoned(m, chunks[m.case.ranks], share)[1] for share in (0.0, 1.0)))
            for m in found
            if m.how == how and m.case.dim * m.case.hidden > GPU_BOUND
        ]
        if runs:
            unhidden[how] = fitted(*zip(*runs, strict=True))
    rows = []
    for m in found:
        c = m.case
        ours = reckoned(m, chunks[c.ranks], unhidden.get(m.how, 0.0))
        pairs = [
            f"{real:.1f} / {time:.1f} ({time / real - 1:+.0%})" for real, time in zip(m.milliseconds, ours, strict=True)
        ]
        sizes = f"{c.dim}/{c.hidden}, {c.rows} rows, {c.experts} experts"
        how = "no transport" if m.how == "in turn" else m.how
        rows.append((str(c.ranks), sizes, "" if m.how == "bf16" else f"`{c.recipe.name}`", how, *pairs))
    fit = "No overlapped run is recorded: the model has no overlap loss."
    if unhidden:
        shares = ", ".join(f"{how} {of:.2f}" for how, of in unhidden.items())
        fit = f"*Overlap loss*, the median of a transport's runs at 7168/2048 and 8192/5120: {shares}."
        fit += " At 2048/1408 CPU launch overhead exceeds the GPU time, which the model leaves out."
    head = "GPUs | dim/hidden, per rank | recipe | pipeline | forward, ms, measured / modelled | and backward"
    return [*_table(head, rows), fit, ""]


def _on_a_host() -> list[str]:
    rows = []
    for dim, hidden in SHAPES:
        for ranks in (2, 4, 8):
            for name, recipe in RECIPES.items():
                both = directions(Case(ranks, ROWS, dim, hidden, 8, recipe))
                found = rates(dim, hidden, ranks)
                bf16 = sum(plain(Case(ranks, ROWS, dim, hidden, 8, recipe), found)) * 1e3
                serial, beside = (sum(map(f, both)) * 1e3 for f in (in_turn, overlapped))
                rows.append((f"{dim}/{hidden}", str(ranks), name, f"{bf16:.1f}", f"{serial:.1f} ({bf16 / serial:.2f}x)",
                             f"{beside:.1f} ({bf16 / beside:.2f}x)",
                             *(f"{d.travel * 1e3:.1f} / {d.local * 1e3:.1f}, {BOUNDS[d.bound]}"
                               for d in both)))  # fmt: skip
    head = ("dim/hidden | GPUs | recipe | bf16, ms | no overlap | overlapped | forward: all-to-all / rest, bound | "
            "backward: all-to-all / rest, bound")  # fmt: skip
    return _table(head, rows)


def _at_scale() -> list[str]:
    rows, recipe = [], RECIPES["`mxfp8`"]
    for dim, hidden in SHAPES:
        for ranks in SCALES:
            cells = []
            for send in SENDS:
                both = directions(case_of(dim, hidden, ranks, recipe, send))
                bounds = " / ".join(BOUNDS[of.bound] for of in both)
                cells.append(f"{sum(map(overlapped, both)) * 1e3:.1f}, {exposed(both):.0%}, {bounds}")
            plan = COUNT * ranks * max(EXPERTS, ranks) * 1e3
            bf16 = sum(plain(case_of(dim, hidden, ranks, recipe, "each"), rates(dim, hidden, ranks))) * 1e3
            rows.append((f"{dim}/{hidden}", str(ranks), f"{bf16:.1f}", *cells, f"{plan:.2f}"))
    head = ("dim/hidden | GPUs | bf16, ms | each copy: ms, exposed, bound | once per rank | once per host | "
            "CPU time of the plan, ms")  # fmt: skip
    return _table(head, rows)


def _rows() -> list[str]:
    """Ranks and hosts of a token, its own included, and the bytes that its rank sends and receives in a layer."""
    rows, dim = [], SHAPES[0][0]
    for experts in (64, EXPERTS):
        for ranks in (4, 8, 64):
            found = distinct(ranks, experts, TOP_K), distinct(max(ranks // GPUS, 1), experts, TOP_K)
            of = f"{found[0]:.2f}", f"{found[1]:.2f}" if ranks > GPUS else ""
            for name, recipe in WIRES.items():
                sizes = [token_bytes(ranks, experts, TOP_K, dim, recipe, how) for how in CHOICES]
                whole = [sum(size) for size in sizes]
                kilobytes = (f"{b / 1e3:.0f}" for direction in zip(*sizes, strict=True) for b in direction)
                saved = (f"{max(1 - b / whole[0], 0):.0%}" for b in whole[1:])
                rows.append((str(experts), str(ranks), *of, name, *kilobytes, *saved))
    head = ("experts | GPUs | ranks of a token | hosts | all-to-alls | forward: `None` | `dispatch` | `both` | "
            "backward: `None` | `dispatch` | `both` | saved by `dispatch` | by `both`")  # fmt: skip
    return _table(head, rows)


def _hidden() -> list[str]:
    rows = [
        (f"{dim}/{hidden}", name, *(str(hidden_up_to(dim, hidden, recipe, send) or "none") for send in SENDS))
        for dim, hidden in SHAPES
        for name, recipe in RECIPES.items()
    ]
    return _table("dim/hidden | recipe | each copy | once per rank | once per host", rows)


def tables() -> str:
    """The generated part of docs/design/ep_scale.md."""
    return "\n".join([
        "## Measured and modelled times", "", *_beside_measured(),
        "## One host (model)", "", *_on_a_host(),
        "## From one host to 1024 GPUs (model)", "", *_at_scale(),
        "## Bytes of a token", "",
        f"KB per token that its rank sends and receives, of a layer with dim {SHAPES[0][0]} and top-{TOP_K}, by "
        "`dispatch(deduplicate=...)`, calculated. Probabilities, 4 bytes per routed copy, are left out.", "", *_rows(),
        "## Scale up to which communication is overlapped (model)", "",
        "GPUs up to which at most a tenth of forward and backward waits for communication:", "", *_hidden(),
    ]).strip()  # fmt: skip


def draw(path: Path) -> None:
    """Write the picture: time of forward and backward by number of GPUs, and of the GEMMs alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from .picture import REPRODUCIBLE, save

    colors = dict(zip(SENDS, ("tab:red", "tab:orange", "tab:green"), strict=True))
    labels = {
        "each": "each copy of a token",
        "summed": "a token once per rank",
        "host": "a token once per host",
    }
    with rc_context(REPRODUCIBLE):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        for axes, (dim, hidden) in zip(figure.subplots(1, len(SHAPES)), SHAPES, strict=True):
            for send in SENDS:
                for name, style in (("`mxfp8`", "-"), ("`mxfp8`, four MXFP8 all-to-alls", ":")):
                    of = [directions(case_of(dim, hidden, ranks, RECIPES[name], send)) for ranks in SCALES]
                    label = f"{labels[send]}, {name.replace('`', '')}"
                    axes.plot(
                        SCALES,
                        [sum(map(overlapped, both)) * 1e3 for both in of],
                        style,
                        color=colors[send],
                        label=label,
                    )
            of = [directions(case_of(dim, hidden, ranks, RECIPES["`mxfp8`"], "each")) for ranks in SCALES]
            axes.plot(
                SCALES,
                [sum(d.local for d in both) * 1e3 for both in of],
                color="black",
                linewidth=1,
                label="without communication",
            )
            axes.axvline(GPUS, color="gray", linewidth=0.8, linestyle="--")
            axes.set(xscale="log", yscale="log", xlabel="GPUs", title=f"{dim}/{hidden}")
            axes.set_xticks(SCALES, [str(n) for n in SCALES], fontsize="x-small")
            low, high = axes.get_ylim()
            ticks = [n for n in (2, 5, 10, 20, 50, 100, 200) if low < n < high]
            axes.set_yticks(ticks, [str(n) for n in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.2)
        figure.axes[0].set_ylabel("forward and backward, ms, modelled")
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), fontsize="x-small", loc="outside lower center", ncols=4
        )
        save(figure, path)


def main() -> None:
    print(tables())
    draw(PICTURE)
    print(f"\nwrote {PICTURE}")


if __name__ == "__main__":
    main()
