"""The tables of docs/design/layer_bytes.md: bytes that one step of the MoE layer moves and that its forward saves."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...cases.shapes import H200, MoELayer
from ...layer_bytes import BYTES_PER_S, FLOPS_PER_S, How, Pass, passes, saved_nbytes
from ..results import newest

Row = Mapping[str, Any]
RECORDED = {
    "grouped_mm_fold": "grouped_mm_fwd",
    "grouped_wgrad_fold": "grouped_mm_wgrad",
    "quantize_row_packed": "quantize_row",
    "permute_mx_fold": "permute_mx_fold",
    "swiglu_row_fold": "swiglu_row_fold_fwd",
    "swiglu_bwd_fold": "swiglu_fold_bwd",
    "combine": "combine",
}
"""Kernel -> the op whose recorded lines time it alone."""
HOWS: tuple[How, ...] = ("plain", "mxfp8", "recompute")


def _sizes(shape: MoELayer) -> str:
    return ", ".join(map(str, shape))


def reached(rows: Sequence[Row]) -> dict[str, float]:
    """Kernel -> the share of the floor's rate that it reaches alone, at 131072 rows of 7168 and hidden 2048."""
    found = {}
    for row in rows:
        case = row["case"]
        sizes = case.get("M"), case.get("K", 7168), case.get("N", case.get("F", 2048)), case.get("direction", "fwd")
        of_product = row["flops"] and case.get("routing") != "balanced"
        if row["frontend"] == "torch" and sizes == (131072, 7168, 2048, "fwd") and not of_product:
            rate, top = (row["flops"], FLOPS_PER_S) if row["flops"] else (row["nbytes"], BYTES_PER_S)
            found[row["op"]] = rate / row["us"] * 1e6 / top
    return {kernel: found[op] for kernel, op in RECORDED.items() if op in found}


def _cell(pass_: Pass) -> str:
    return f"{pass_.nbytes / 1e9:.2f}, {pass_.floor_us / 1e3:.2f}"


def _moved() -> list[str]:
    shapes, recorded = H200.moe_layers, newest("h200")
    steps, shares = [passes(shape) for shape in shapes], reached(recorded)
    times = {tuple(r["case"][n] for n in MoELayer._fields): r["us"] for r in recorded
             if r["op"] == "moe_layer_fwd_bwd" and r["frontend"] == "torch"
             and not {"weights", "launch", "clock", "routing"} & r["case"].keys()}  # fmt: skip
    head = ["", "kernel", "operands", *map(_sizes, shapes), "floor / time, alone"]
    rows = []
    for of_op in zip(*steps, strict=True):
        one = of_op[0]
        share = f"{shares[one.op]:.0%}" if one.op in shares else ""
        rows.append(("backward" if one.backward else "forward", f"`{one.op}`", one.operands, *map(_cell, of_op), share))
    floors = [sum(p.floor_us for p in step) for step in steps]
    total = [f"{sum(p.nbytes for p in step) / 1e9:.2f}, {us / 1e3:.2f}" for step, us in zip(steps, floors, strict=True)]
    rows.append(("together", "", "", *total, ""))
    measured = [times.get(tuple(shape)) for shape in shapes]
    share = [f"{us / 1e3:.2f}, {floor / us:.0%}" if us else "" for us, floor in zip(measured, floors, strict=True)]
    rows.append(("measured ms, floor / measured", "", "", *share, ""))
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def _saved() -> list[str]:
    head = ["tokens, D, F, experts, k", "unfused bf16, KB per token", "`mxfp8`: activations", "quantized weights, GB",
            "activations with `recompute`", "GB: bf16 / `mxfp8` / `recompute`"]  # fmt: skip
    rows = []
    for shape in H200.moe_layers:
        found = [saved_nbytes(shape, how) for how in HOWS]
        per_token = [f"{activations / shape.tokens / 1e3:.1f}" for activations, _ in found]
        together = " / ".join(f"{sum(of) / 1e9:.2f}" for of in found)
        rows.append((_sizes(shape), per_token[0], per_token[1], f"{found[1][1] / 1e9:.2f}", per_token[2], together))
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def tables() -> str:
    """The generated part of docs/design/layer_bytes.md."""
    moved = [
        "## Bytes moved by each kernel",
        "",
        "GB, and the floor in ms. Columns: tokens, D, F, experts, k.",
        "",
        *_moved(),
        "",
    ]
    return "\n".join([*moved, "## Bytes saved by the forward", "", *_saved()])
