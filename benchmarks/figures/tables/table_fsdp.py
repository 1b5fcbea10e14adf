"""The table of steps under FSDP2 that gather experts as bytes: a row per model, ranks and mesh."""

from typing import Any

from .table_ops import machine

Row = dict[str, Any]
COLUMNS = ("layers of, number", "GPUs, data x experts", "tokens per rank", "ms of a step: values / bytes (n, spread)",
           "values / bytes", "gathered GiB per rank: values / bytes", "peak GiB: values / bytes")  # fmt: skip


def is_fsdp(op: str) -> bool:
    return op == "fsdp_gather_step"


def _gib(theirs: int | None, ours: int | None) -> str:
    return "" if theirs is None or ours is None else f"{theirs / 2**30:.2f} / {ours / 2**30:.2f}"


def _cells(row: Row) -> tuple[str, ...]:
    case = row["case"]
    return (
        f"{case['model']}, {case['layers']}",
        f"{case['ranks']}, {case['mesh']}",
        str(case["tokens"]),
        f"{row['peer_us'] / 1e3:.1f} / {row['us'] / 1e3:.1f} ({row['n']}, {row['spread']:.0%})",
        f"{row['ratio']:.2f}x",
        _gib(row["peer_nbytes"], row["nbytes"]),
        _gib(row.get("peer_peak_nbytes"), row["peak_nbytes"]),
    )


def table(rows: list[Row]) -> str:
    """The section; "" without lines."""
    if not rows:
        return ""
    gpus = [{**row, "hardware": row["hardware"].split("x ")[-1]} for row in rows]  # a column has their number
    return "\n".join([
        "## FSDP2: experts gathered as bytes",
        "",
        f"{machine(gpus)}. A forward and a backward of layers of the published sizes, without attention, under "
        "`shard_moe`: weights fp32, mixed precision bf16, recipe `mxfp8`, balanced routing. *Values*: "
        "`quantized_gather=False`; *bytes*: `True`. Both sides alternate in one run, after a check that loss and "
        "gradients have equal bytes.",
        "",
        "- *gathered*: what FSDP2's all-gathers of experts write in a step. *Peak*: without the sharded weights.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
    ])  # fmt: skip
