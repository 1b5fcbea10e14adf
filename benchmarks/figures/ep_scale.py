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
    forward,
    in_turn,
    overlapped,
    plain,
    token_bytes,
)
from .ep_rates import GPUS, measured, modelled, rates
from .results import RESULTS, newest

PICTURE = RESULTS / "h200_ep_scale.svg"
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
SENDS: tuple[Send, ...] = ("each", "summed")
BOUNDS = {"wire": "communication", "products": "GEMMs"}
SCALES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def case_of(dim: int, hidden: int, ranks: int, recipe: Recipe, send: Send) -> Case:
    """131072 rows per rank, of eight per token; 256 experts, or one per rank if there are more ranks."""
    return Case(ranks, ROWS, dim, hidden, max(EXPERTS // ranks, 1), recipe, TOP_K, send)


def directions(case: Case) -> tuple[Direction, Direction]:
    """Forward and backward."""
    found = rates(case.dim, case.hidden)
    return forward(case, found), backward(case, found)


def best(case: Case) -> tuple[str, float]:
    """How the exchange runs, and its seconds, forward and backward: within a host overlapped, if a row is a replica."""
    both = directions(case)
    if case.ranks <= GPUS and case.send == "each":
        return "overlapped", sum(map(overlapped, both))
    return "no overlap", sum(map(in_turn, both))


def _table(head: str, rows: list[tuple[str, ...]]) -> list[str]:
    columns = head.split(" | ")
    return [f"| {head} |", f"|{' --- |' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _beside_measured() -> list[str]:
    rows = []
    for m in measured(newest("h200_ep", lambda op: op in ("ep_fwd", "ep_fwd_bwd"))):
        c = m.case
        pairs = [
            f"{real:.1f} / {time:.1f} ({time / real - 1:+.0%})"
            for real, time in zip(m.milliseconds, modelled(m), strict=True)
        ]
        sizes = f"{c.dim}/{c.hidden}, {c.rows} rows, {c.experts} experts"
        how = {"in turn": "no transport", "bf16": "bf16"}.get(m.how, "`PeerMemory`, in a graph")
        rows.append((str(c.ranks), sizes, "" if m.how == "bf16" else f"`{c.recipe.name}`", how, *pairs))
    head = "GPUs | dim/hidden, per rank | recipe | pipeline | forward, ms, measured / modelled | and backward"
    return _table(head, rows)


def _on_a_host() -> list[str]:
    """The overlapped exchange is of the default recipe."""
    rows = []
    for dim, hidden in SHAPES:
        for ranks in (2, 4, 8):
            for name, recipe in RECIPES.items():
                case = Case(ranks, ROWS, dim, hidden, 8, recipe)
                bf16, both = sum(plain(case, rates(dim, hidden))) * 1e3, directions(case)
                cells = []
                for total in (in_turn, overlapped):
                    ms = sum(map(total, both)) * 1e3
                    cells.append(f"{ms:.1f} ({bf16 / ms:.2f}x)")
                cells += [f"{d.travel * 1e3:.1f} / {d.local * 1e3:.1f}, {BOUNDS[d.bound]}" for d in both]
                cells = cells if name == "`mxfp8`" else [cells[0], "", "", ""]
                rows.append((f"{dim}/{hidden}", str(ranks), name, f"{bf16:.1f}", *cells))
    head = ("dim/hidden | GPUs | recipe | bf16, ms | no overlap | overlapped | forward: communication / rest, bound | "
            "backward: communication / rest, bound")  # fmt: skip
    return _table(head, rows)


def _at_scale() -> list[str]:
    rows, recipe = [], RECIPES["`mxfp8`"]
    for dim, hidden in SHAPES:
        for ranks in SCALES:
            bf16 = sum(plain(case_of(dim, hidden, ranks, recipe, "each"), rates(dim, hidden))) * 1e3
            found = [best(case_of(dim, hidden, ranks, recipe, send)) for send in SENDS]
            cells = (f"{seconds * 1e3:.1f}, {how} ({bf16 / seconds / 1e3:.2f}x)" for how, seconds in found)
            rows.append((f"{dim}/{hidden}", str(ranks), f"{bf16:.1f}", *cells))
    return _table("dim/hidden | GPUs | bf16, ms | a row per routed copy, ms | a token once per rank, ms", rows)


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


def tables() -> str:
    """The generated part of docs/design/ep_scale.md."""
    return "\n".join([
        "## Measured and modelled times", "", *_beside_measured(),
        "## One host (model)", "", *_on_a_host(),
        "## From one host to 1024 GPUs (model)", "", *_at_scale(),
        "## Bytes of a token", "",
        f"KB per token that its rank sends and receives, of a layer with dim {SHAPES[0][0]} and top-{TOP_K}, by "
        "`dispatch(deduplicate=...)`, calculated. Probabilities, 4 bytes per routed copy, are left out.", "", *_rows(),
    ]).strip()  # fmt: skip


def draw(path: Path) -> None:
    """Write the picture: time of forward and backward by number of GPUs, and of the GEMMs alone."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from .picture import REPRODUCIBLE, save

    colors = dict(zip(SENDS, ("tab:red", "tab:orange"), strict=True))
    labels = {"each": "each copy of a token", "summed": "a token once per rank"}
    with rc_context(REPRODUCIBLE):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        for axes, (dim, hidden) in zip(figure.subplots(1, len(SHAPES)), SHAPES, strict=True):
            for send in SENDS:
                for name, style in (("`mxfp8`", "-"), ("`mxfp8`, four MXFP8 all-to-alls", ":")):
                    of = [best(case_of(dim, hidden, ranks, RECIPES[name], send)) for ranks in SCALES]
                    label = f"{labels[send]}, {name.replace('`', '')}"
                    axes.plot(
                        SCALES,
                        [seconds * 1e3 for _, seconds in of],
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
