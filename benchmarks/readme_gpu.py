"""The README's table of the GPU: one line per op and shape, beside what it is held to."""

from typing import Any

from .bars import AT_MOST_US, JAX_OVER_TORCH, OF_A_COPY, bar

Row = dict[str, Any]
COLUMNS = ("op", "shape", "kernel", "ms (spread)", "reached (required)",
           "torch.compile takes", "jax.jit takes", "JAX / torch")  # fmt: skip


def _shape(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row["case"].items() if key != "implementation")


def _times(row: Row | None) -> str:
    return f"{row['ratio']:.2f}x" if row else ""


def _cells(op: str, rows: list[Row]) -> tuple[str, ...]:
    """A peer's time is told in ours."""
    peers = {(row["frontend"], row["peer"]): row for row in rows}
    ours, jax = peers["torch", "copy"], peers.get(("jax", "torch_frontend"))
    held_to, jax_held_to = bar(ours), bar(jax) if jax else None
    reached = f"{held_to.measured:.2f} ({held_to.required:g})" if held_to else ""
    return (
        f"`{op}`",
        _shape(ours),
        ours["case"]["implementation"].split(",")[0],
        f"{ours['us'] / 1e3:.3f} ({ours['spread']:.0%})",
        reached + (" **missed**" if held_to and not held_to.met else ""),
        _times(peers.get(("torch", "torch_compile"))),
        _times(peers.get(("jax", "jax_jit"))),
        f"{jax_held_to.measured:.2f}{'' if jax_held_to.met else ' **missed**'}" if jax_held_to else "",
    )


def gpu(rows: list[Row]) -> str:
    """The table, and the host's time in a line below it. Lines of an op that has no bar any more stay in the record."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["op"] in OF_A_COPY.keys() | AT_MOST_US.keys():
            groups.setdefault((row["op"], _shape(row)), []).append(row)
    host = [row["us"] for row in rows if row["op"] == "host_overhead"]
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    lines = [
        f"{rows[0]['hardware']}, {versions}; medians, an op's lines of one run, exact bytes checked before timing.",
        "Reached: share of a device copy's bandwidth (`routing`: microseconds), required in brackets. "
        f"JAX / torch: device time, at most {JAX_OVER_TORCH}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(op, of_one))} |" for (op, _), of_one in groups.items() if op != "host_overhead"),
    ]
    if host:
        lines += ["", f"Host time of one eager torch op: {min(host):.0f} to {max(host):.0f} us, at most 30 required."]
    return "\n".join(lines)
