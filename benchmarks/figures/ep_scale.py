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
    Program,
    Stages,
    backward,
    backward_program,
    distinct,
    forward,
    forward_program,
    plain,
    run,
    token_bytes,
)
from .ep_rates import GPUS, OVERLAPPED, compute, measured, rates
from .results import RESULTS, newest

PICTURE = RESULTS / "h200_ep_scale.svg"
TRANSFERS = ("dispatch", "dispatch_grad", "combine", "combine_grad")
MXFP8 = "`mxfp8`"
RECIPES = {
    MXFP8: Recipe.parse("mxfp8"),
    "`mxfp8`, four MXFP8 all-to-alls": Recipe.parse("mxfp8", mxfp8_all_to_all=TRANSFERS),
    "`mxfp8_wgrad_with_hp`": Recipe.parse("mxfp8_wgrad_with_hp"),
}
SENT = {
    "bf16": Recipe.parse("bf16"),
    "MXFP8 to the experts, bf16 back": Recipe.parse("mxfp8"),
    "MXFP8": Recipe.parse("mxfp8", mxfp8_all_to_all=TRANSFERS),
}
SHAPES = tuple((p.K, p.N) for p in TIMED if p.routing == "balanced")
ROWS, TOP_K, EXPERTS = TIMED_LAYER.tokens, TIMED_LAYER.top_k, TIMED_LAYER.num_experts
SCALES = (2, 4, 8, 16, 64, 256, 1024)
HOWS = {"in turn": "no transport", OVERLAPPED: "`PeerMemory`, in a CUDA graph"}


def case_of(dim: int, hidden: int, ranks: int, recipe: Recipe, once: bool = False) -> Case:
    """131072 rows per rank, of eight per token; 256 experts, or one per rank if there are more ranks."""
    return Case(ranks, ROWS, dim, hidden, max(EXPERTS // ranks, 1), recipe, TOP_K, once)


def stages(case: Case) -> tuple[Stages, Stages]:
    """Forward and backward without overlap."""
    found = rates(case.dim, case.hidden)
    return forward(case, found), backward(case, found)


def programs(case: Case) -> tuple[Program, Program] | None:
    """Forward and backward where the device drives the exchange; else None."""
    found = rates(case.dim, case.hidden)
    return (forward_program(case, found), backward_program(case, found)) if case.overlaps(GPUS) else None


def seconds(case: Case, both: tuple[Program, Program]) -> float:
    return sum(run(program, rates(case.dim, case.hidden)) for program in both)


def exposed(case: Case, both: tuple[Program, Program]) -> float:
    """The share of the overlapped time that communication adds, by waits and by fewer SMs for GEMMs."""
    return 1 - sum(program.local for program in both) / seconds(case, both)


def _table(head: str, rows: list[tuple[str, ...]]) -> list[str]:
    columns = head.split(" | ")
    return [f"| {head} |", f"|{' --- |' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _measured() -> list[str]:
    recorded = list(newest("h200_ep", lambda op: op in ("ep_fwd", "ep_fwd_bwd")))
    found, rows = list(measured(recorded)), []
    for case, how, milliseconds in found:
        pairs = [f"{real:.1f} / {time:.1f} ({time / real - 1:+.0%})"
                 for real, time in zip(milliseconds, compute(case, how), strict=True)]  # fmt: skip
        sizes = f"{case.dim}/{case.hidden}, {case.rows} rows, {case.experts} experts"
        recipe = "" if how == "bf16" else f"`{case.recipe.name}`"
        rows.append((str(case.ranks), sizes, recipe, HOWS.get(how, how), *pairs))
    none = not any(how == OVERLAPPED for _, how, _ in found)
    head = "GPUs | dim/hidden, per rank | recipe | exchange | forward, ms, measured / modelled | and backward"
    return [*_table(head, rows), *(["No overlapped run is recorded.", ""] if none else [])]


def _on_a_host() -> list[str]:
    rows = []
    for dim, hidden in SHAPES:
        for ranks in (2, 4, 8):
            cases = [Case(ranks, ROWS, dim, hidden, 8, recipe) for recipe in RECIPES.values()]
            bf16 = sum(plain(cases[0], rates(dim, hidden))) * 1e3
            cells = [_ms(sum(map(sum, stages(case))) * 1e3, bf16) for case in cases]
            both = programs(cases[0])
            if both is None:
                cells += [""] * 4
            else:
                cells += [_ms(seconds(cases[0], both) * 1e3, bf16), f"{exposed(cases[0], both):.0%}"]
                cells += [f"{program.copies * 1e3:.1f} / {program.local * 1e3:.1f}" for program in both]
            rows.append((f"{dim}/{hidden}", str(ranks), f"{bf16:.1f}", *cells))
    head = (f"dim/hidden | GPUs | bf16, ms | no overlap: {' | '.join(RECIPES)} | {MXFP8} overlapped | exposed | "
            "forward: copies / rest, ms | backward: copies / rest, ms")  # fmt: skip
    return _table(head, rows)


def _ms(time: float, bf16: float) -> str:
    return f"{time:.1f} ({bf16 / time:.2f}x)"


def _at_scale() -> list[str]:
    rows, recipe = [], RECIPES[MXFP8]
    for dim, hidden in SHAPES:
        for ranks in SCALES:
            cells = []
            for once in (False, True):
                both = stages(case_of(dim, hidden, ranks, recipe, once))
                total = sum(map(sum, both))
                cells.append(f"{total * 1e3:.1f}, {sum(of.transfers for of in both) / total:.0%}")
            case = case_of(dim, hidden, ranks, recipe)
            found = programs(case)
            cells.append(f"{seconds(case, found) * 1e3:.1f}, {exposed(case, found):.0%}" if found else "")
            bf16 = sum(plain(case, rates(dim, hidden))) * 1e3
            rows.append((f"{dim}/{hidden}", str(ranks), f"{bf16:.1f}", *cells))
    head = ("dim/hidden | GPUs | bf16, ms | no overlap: ms, all-to-alls | `deduplicate=\"both\"`: ms, all-to-alls | "
            "overlapped: ms, exposed")  # fmt: skip
    return _table(head, rows)


def _rows() -> list[str]:
    """Ranks of a token, its own included, and the bytes that its rank sends and receives in a layer."""
    rows, dim = [], SHAPES[0][0]
    for experts in (64, EXPERTS):
        for ranks in (4, 8, 64):
            of = f"{distinct(ranks, experts, TOP_K):.2f}"
            for name, recipe in SENT.items():
                sizes = [token_bytes(ranks, experts, TOP_K, dim, recipe, how) for how in CHOICES]
                whole = [sum(size) for size in sizes]
                kilobytes = (f"{b / 1e3:.0f}" for direction in zip(*sizes, strict=True) for b in direction)
                saved = (f"{max(1 - b / whole[0], 0):.0%}" for b in whole[1:])
                rows.append((str(experts), str(ranks), of, name, *kilobytes, *saved))
    head = ("experts | GPUs | ranks of a token | all-to-alls | forward: `None` | `dispatch` | `both` | "
            "backward: `None` | `dispatch` | `both` | saved by `dispatch` | by `both`")  # fmt: skip
    return _table(head, rows)


def tables() -> str:
    """The generated part of docs/design/ep_scale.md."""
    return "\n".join([
        "## Measured and modelled times", "", *_measured(),
        "## One host (model)", "", *_on_a_host(),
        "## From one host to 1024 GPUs (model)", "", *_at_scale(),
        "## Bytes of a token", "",
        f"KB per token that its rank sends and receives, of a layer with dim {SHAPES[0][0]} and top-{TOP_K}, by "
        "`dispatch(deduplicate=...)`, calculated. Probabilities, 4 bytes per routed copy, are left out.", "", *_rows(),
    ]).strip()  # fmt: skip


def _curves(dim: int, hidden: int) -> dict[str, tuple[str, list[float]]]:
    """Color and milliseconds of forward and backward of each curve, for the first of SCALES."""
    recipe, found = RECIPES[MXFP8], rates(dim, hidden)
    cases = [case_of(dim, hidden, ranks, recipe) for ranks in SCALES]
    curves = {
        "bf16": ("tab:gray", [sum(plain(case, found)) for case in cases]),
        "no overlap": ("tab:red", [sum(map(sum, stages(case))) for case in cases]),
        'deduplicate="both"': ("tab:orange", [sum(map(sum, stages(case._replace(once=True)))) for case in cases]),
        "overlapped": ("tab:green", [seconds(case, both) for case in cases if (both := programs(case))]),
        "no overlap, without the all-to-alls": ("black", [sum(of.local for of in stages(case)) for case in cases]),
    }
    return {name: (color, [time * 1e3 for time in times]) for name, (color, times) in curves.items()}


def draw(path: Path) -> None:
    """Write the picture: time of forward and backward by number of GPUs."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from .picture import REPRODUCIBLE, save

    with rc_context(REPRODUCIBLE):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        for axes, (dim, hidden) in zip(figure.subplots(1, len(SHAPES)), SHAPES, strict=True):
            for name, (color, times) in _curves(dim, hidden).items():
                axes.plot(SCALES[: len(times)], times, color=color, label=name)
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
            *figure.axes[0].get_legend_handles_labels(), fontsize="x-small", loc="outside lower center", ncols=5
        )
        save(figure, path)


def main() -> None:
    print(tables())
    draw(PICTURE)
    print(f"\nwrote {PICTURE}")


if __name__ == "__main__":
    main()
