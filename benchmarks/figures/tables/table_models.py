"""The tables of whole training steps: tokens per second of every model, and the parts of a step."""

from collections.abc import Sequence
from typing import Any

from ..bars import bar
from .table_ops import machine

Row = dict[str, Any]
OP = "model_step"
COLUMNS = ("model", "layers", "experts", "GPUs", "candidate", "best bf16",
           "tokens/s: best bf16 / candidate (n, spread)", "speedup", "experts alone", "ceiling", "of the ceiling",
           "joules per 1000 tokens: best bf16 / candidate",
           "peak memory, GiB: best bf16 / candidate", "dB", "loss", "bar", "commit")  # fmt: skip
OURS = "mxfp8"


def is_model(op: str) -> bool:
    return op == OP


def tokens_of(row: Row) -> int:
    """Of an optimizer step of all GPUs."""
    case = row["case"]
    return case["sequences"] * case["length"] * case["micro_batches"] * case["gpus"]


def _named(row: Row, key: str) -> str:
    """A candidate, with the frontend if it is not torch."""
    return f"`{row['case'][key]}`" + (", JAX" if row["frontend"] == "jax" else "")


def _pair(row: Row, key: str, scale: float, form: str) -> str:
    """The peer's value and ours; "" where one is missing."""
    values: list[Any] = [row.get(f"peer_{key}"), row.get(key)]
    return " / ".join(format(value * scale, form) for value in values) if all(values) else ""


def _cells(row: Row) -> tuple[str, ...]:
    case, tokens, error = row["case"], tokens_of(row), row["error"]
    rates = " / ".join(f"{tokens / us * 1e6:,.0f}" for us in (row["peer_us"], row["us"]))
    compared = error["grade"] != "reference"
    return (
        f"`{case['model']}`",
        f"{case['layers']} of {case['of_layers']}",
        f"{case['experts']} of {case['of_experts']}",
        str(case["gpus"]),
        _named(row, "candidate"),
        _named(row, "peer_is"),
        f"{rates} ({row['n']}, {row['spread']:.0%})",
        f"{row['ratio']:.2f}x",
        f"{row['experts_ratio']:.2f}x",
        f"{row['ceiling']:.2f}x",
        f"{row['ratio'] / row['ceiling']:.2f}",
        _pair(row, "joules", 1000 / tokens, ".1f"),
        _pair(row, "peak_nbytes", 2**-30, ".1f"),
        f"{error['sqnr_db']}" if compared else "",
        f"{error['loss']:.2%}" if compared else "",
        str(bar(row) or ""),
        row["commit"][:7],
    )


def _parts(rows: Sequence[Row]) -> list[str]:
    """Shares of the step of each model's candidates and of its best bf16, in the order of the first row."""
    names = list(rows[0]["parts_us"])
    shown: dict[tuple[str, str], Row] = {}
    for row in rows:
        case = row["case"]
        on = f", {case['gpus']} GPUs" if case["gpus"] > 1 else ""
        shown.setdefault((case["model"], _named(row, "peer_is") + on), row["peer_parts_us"])
        shown.setdefault((case["model"], _named(row, "candidate") + on), row["parts_us"])
    cells = [
        (f"`{model}`", candidate, *(f"{parts[name] / sum(parts.values()):.1%}" for name in names))
        for (model, candidate), parts in sorted(shown.items())
    ]
    return _table(("model", "candidate", *names), cells)


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *(f"| {' | '.join(row)} |" for row in cells)]


def table(rows: list[Row]) -> str:
    """The section; "" without lines."""
    if not rows:
        return ""
    rows = sorted(rows, key=lambda row: (row["case"]["model"], row["case"]["gpus"], row["case"]["candidate"] != OURS))
    case = rows[0]["case"]
    of_gpus = [{**row, "hardware": row["hardware"].split("x ")[-1]} for row in rows]  # a column has their number
    return "\n".join([
        "## Whole training steps of models",
        "",
        f"{machine(of_gpus)}. Models of transformers by their published sizes, random weights, real text; "
        f"{case['sequences']} sequences of {case['length']} tokens per micro-batch and {case['micro_batches']} "
        "micro-batches per optimizer step: forward, backward, clipping and fused AdamW. Weights, gradients and moments "
        "are bf16, the layers of every candidate are compiled, and head and loss take one sequence at a time. JAX: the "
        "same layers in plain JAX with AdamW of optax, and the peak memory of XLA's plan. Several GPUs: weights "
        "sharded by FSDP2, tokens per second and joules of all.",
        "",
        "- *layers*, *experts*: as many layers as fit, without recomputation, each with experts; of the published.",
        "- *best bf16*: the faster of recipe `bf16` of mxep and `grouped_mm` of transformers, in JAX `ragged_dot`, in "
        "the same run.",
        "- *experts alone*: time of the experts of a layer, forward and backward, of the best bf16 divided by the "
        "candidate's, of the first layer's tokens.",
        "- *ceiling*: the speedup if the experts are faster by *experts alone* and the rest of the best bf16's step is "
        "unchanged. Dense layers are bf16 but in `mxfp8_dense`, where they are faster by their own ratio.",
        "- *dB*: SQNR of the worst weight gradient of one layer; *loss*: the largest difference of a loss of the first "
        "steps. Both relative to `grouped_mm`; in JAX to `ragged_dot`, and the loss to recipe `bf16`.",
        "",
        *_table(COLUMNS, [_cells(row) for row in rows]),
        "",
        "Time of the kernels by part, from a profile of steps that are not timed. *dispatch*, *products*, *activation* "
        "and *quantization* are the experts; *activation* quantizes its results in `mxfp8`, and has shared experts' "
        "too. *dense*: other matmuls of the layers. A fused kernel counts for one part. *idle*: the rest of the timed "
        "step.",
        "",
        *_parts(rows),
    ])  # fmt: skip
