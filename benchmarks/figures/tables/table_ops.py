"""The table of the ops that a device copy bounds: one row per op and shape, with its bar."""

from typing import Any

from ..bars import AT_MOST_US, JAX_OVER_TORCH, OF_A_COPY, bar

Row = dict[str, Any]
COLUMNS = ("op", "shape", "kernel", "time in ms (spread)", "reached (required)",
           "`torch.compile` / ours", "`jax.jit` / ours", "JAX / torch")  # fmt: skip


def shape_of(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row["case"].items() if key != "implementation")


def _ratio(row: Row | None) -> str:
    return f"{row['ratio']:.2f}x" if row else ""


def _cells(op: str, rows: list[Row]) -> tuple[str, ...]:
    peers = {(row["frontend"], row["peer"]): row for row in rows}
    ours, jax = peers["torch", "copy"], peers.get(("jax", "torch_frontend"))
    our_bar, jax_bar = bar(ours), bar(jax) if jax else None
    unit = " us" if op in AT_MOST_US else ""
    reached = f"{our_bar.measured:.2f}{unit} ({our_bar.required:g}{unit})" if our_bar else ""
    return (
        f"`{op}`",
        shape_of(ours),
        ours["case"]["implementation"].split(",")[0],
        f"{ours['us'] / 1e3:.3f} ({ours['spread']:.0%})",
        reached + (" **missed**" if our_bar and not our_bar.met else ""),
        _ratio(peers.get(("torch", "torch_compile"))),
        _ratio(peers.get(("jax", "jax_jit"))),
        f"{jax_bar.measured:.2f}{'' if jax_bar.met else ' **missed**'}" if jax_bar else "",
    )


def machine(rows: list[Row]) -> str:
    """Hardware, versions and commits of the lines."""
    versions = ", ".join(f"{name} {version}" for name, version in rows[-1]["versions"].items())
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))
    return f"{rows[-1]['hardware']}, {versions}, commit {commits}"


def table(rows: list[Row]) -> str:
    """The section with the table and the host time; "" without lines. Recorded ops without a bar are left out."""
    rows = [row for row in rows if row["op"] in {**OF_A_COPY, **AT_MOST_US}]
    if not rows:
        return ""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"], shape_of(row)), []).append(row)
    host = [row["us"] for row in rows if row["op"] == "host_overhead"]
    lines = [
        "## Ops, on a GPU",
        "",
        f"{machine(rows)}. Times are medians of device time; the outputs are compared byte for byte before timing.",
        "",
        "- *reached*: fraction of the bandwidth of a device-to-device copy with as many bytes; for `routing` the time.",
        "- *`torch.compile` / ours*, *`jax.jit` / ours*: time of the compiled formula divided by our time.",
        f"- *JAX / torch*: our device time in JAX divided by our device time in torch; at most {JAX_OVER_TORCH}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(op, of_one))} |" for (op, _), of_one in groups.items() if op != "host_overhead"),
    ]
    if host:
        of = ", ".join(sorted({row["commit"][:7] for row in rows if row["op"] == "host_overhead"}))
        lines += [
            "",
            f"Host time of an eager torch op, {len(host)} ops at {of}: {min(host):.0f} to {max(host):.0f} us.",
        ]
    return "\n".join(lines)
