"""The table of dense layers on a GPU: a row per size and recipe."""

from typing import Any

from .table_ops import machine

Row = dict[str, Any]
NAMES = {"linear_fwd_bwd": "one layer", "linear_shared_rows_fwd_bwd": "layers that read the same x"}
COLUMNS = ("layer", "rows, K, N", "recipe", "time in ms (n, spread)", "TF/s", "`F.linear` / mxep",
           "compiled `F.linear` / mxep", "`torch._scaled_mm` / mxep", "torchao / mxep", "in a graph: `F.linear` / mxep",
           "compiled: compiled `F.linear` / mxep", "JAX: bf16 dot / mxep", "dB")  # fmt: skip


def is_linear(op: str) -> bool:
    return op in NAMES


def _key(row: Row) -> tuple[Any, ...]:
    case = row["case"]
    return row["op"], case["M"], case["K"], case["N"], case["recipe"]


def _cells(rows: list[Row]) -> tuple[str, ...]:
    by = {(row["frontend"], row["case"].get("launch"), row["peer"]): row for row in rows}
    ours = next(row for row in rows if row["frontend"] == "torch" and "launch" not in row["case"])

    def ratio(peer: str, launch: str | None = None, frontend: str = "torch") -> str:
        row = by.get((frontend, launch, peer))
        return f"{row['ratio']:.2f}x" if row else ""

    case = ours["case"]
    return (
        NAMES[ours["op"]],
        f"{case['M']}, {case['K']}, {case['N']}",
        f"`{case['recipe']}`",
        f"{ours['us'] / 1e3:.3f} ({ours['n']}, {ours['spread']:.0%})",
        f"{ours['flops'] / ours['us'] / 1e6:.0f}",
        ratio("torch_linear_bf16"),
        ratio("torch_linear_bf16_compiled"),
        ratio("torch_scaled_mm_rowwise"),
        ratio("torchao_float8_rowwise"),
        ratio("torch_linear_bf16", "graph"),
        ratio("torch_linear_bf16_compiled", "compiled"),
        ratio("jax_dot_bf16", frontend="jax"),
        f"{ours['error']['sqnr_db']:.1f}",
    )


def table(rows: list[Row]) -> str:
    """The section with the table; "" without lines."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    measured = [of for of in groups.values() if any(r["frontend"] == "torch" and "launch" not in r["case"] for r in of)]
    if not measured:
        return ""
    lines = [
        "## Dense layers, on a GPU",
        "",
        f"{machine(rows)}. Forward and both gradients from bf16, with all quantization, step behind step; medians of "
        "one run. Output and gradients are checked against bf16 before timing.",
        "",
        "- *peer / mxep*: time of the peer divided by the time of mxep. Above 1 mxep is faster.",
        "- *`torch._scaled_mm`*: E4M3 with one scale per row, its quantization compiled. *torchao*: float8 training, "
        "recipe `rowwise`, compiled.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(of))} |" for of in measured),
    ]
    return "\n".join(lines)
