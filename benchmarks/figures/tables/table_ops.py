"""The table of the ops that a device copy bounds: one row per op and shape."""

from typing import Any

from ..bars import AT_MOST_US, OF_A_COPY

Row = dict[str, Any]
COLUMNS = ("op", "shape", "kernel", "time in ms (spread)", "reached",
           "`torch.compile` / mxep", "`jax.jit` / mxep", "JAX / torch")  # fmt: skip


def shape_of(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row["case"].items() if key != "implementation")


def _ratio(row: Row | None) -> str:
    return f"{row['ratio']:.2f}x" if row else ""


def _cells(op: str, rows: list[Row]) -> tuple[str, ...]:
    peers = {(row["frontend"], row["peer"]): row for row in rows}
    ours, jax = peers["torch", "copy"], peers.get(("jax", "torch_frontend"))
    reached = f"{ours['us']:.2f} us" if op in AT_MOST_US else f"{ours['of_roof']:.2f}"
    return (
        f"`{op}`",
        shape_of(ours),
        ours["case"]["implementation"].split(",")[0],
        f"{ours['us'] / 1e3:.3f} ({ours['spread']:.0%})",
        reached,
        _ratio(peers.get(("torch", "torch_compile"))),
        _ratio(peers.get(("jax", "jax_jit"))),
        f"{jax['us'] / jax['peer_us']:.2f}" if jax else "",
    )


def machine(rows: list[Row]) -> str:
    """Hardware, versions and commits of the lines."""
    versions = ", ".join(f"{name} {version}" for name, version in rows[-1]["versions"].items())
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows))
    return f"{rows[-1]['hardware']}, {versions}, commit {commits}"


def table(rows: list[Row]) -> str:
    """The section with the table and the host time; "" without lines. Recorded ops that no copy bounds are left out."""
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
        f"{machine(rows)}. Times are medians of device time. Outputs are compared byte for byte before timing.",
        "",
        "- *reached*: share of the bandwidth of a device-to-device copy with as many bytes. For `routing`: the time.",
        "- *`torch.compile` / mxep*, *`jax.jit` / mxep*: time of the compiled formula divided by the time of mxep.",
        "- *JAX / torch*: device time of mxep in JAX divided by its device time in torch. Above 1 JAX is slower.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(op, of_one))} |" for (op, _), of_one in groups.items() if op != "host_overhead"),
    ]
    if host:
        of = ", ".join(sorted({row["commit"][:7] for row in rows if row["op"] == "host_overhead"}))
        lines += [
            "",
            f"CPU time of an eager torch op, {len(host)} ops at {of}: {min(host):.0f} to {max(host):.0f} us.",
        ]
    return "\n".join(lines)
