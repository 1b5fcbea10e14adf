"""The table of the whole MoE layer on a GPU."""

from collections.abc import Sequence
from typing import Any

from ...layer_bytes import BYTES_PER_S
from .table_ops import machine

Row = dict[str, Any]
NAMES = {"moe_layer_fwd": "forward", "moe_layer_fwd_bwd": "forward and backward"}
COLUMNS = ("layer", "tokens, D, F, experts, k", "weights", "back to back, ms: bf16 / mxep (n, spread)", "speedup",
           "single step, ms: bf16 / mxep (n, spread)", "speedup", "JAX back to back, ms (n, spread)", "speedup",
           "`jax.lax.ragged_dot` / JAX", "dB", "peak memory, GiB: bf16 / mxep")  # fmt: skip
OWN_COLUMNS = ("layer", "tokens, D, F, experts, k", "weights", "back to back, ms: recipe `bf16` / {recipe} (n, spread)",
               "speedup", "joules of a step: bf16 / recipe `bf16` / {recipe}",
               "peak memory, GiB: recipe `bf16` / {recipe}")  # fmt: skip
PLAIN, RECIPE_BF16 = "plain_torch_bf16", "recipe_bf16"


def is_layer(op: str) -> bool:
    return op in NAMES


def _sizes(row: Row) -> str:
    return ", ".join(str(row["case"][name]) for name in ("tokens", "dim", "hidden_dim", "num_experts", "top_k"))


def _layer(row: Row) -> str:
    routing = row["case"].get("routing")
    return f"{NAMES[row['op']]}, {routing.replace('_', ' ')}" if routing else NAMES[row["op"]]


def _how(row: Row) -> str:
    how = "cached" if row["case"].get("weights") else "quantized in every step"
    return f"{how}, in a CUDA graph" if row["case"].get("launch") else how


def in_a_row(rows: Sequence[Row]) -> Row | None:
    """Torch's layer against the plain one where steps follow each other. Older lines have it only as two peers of JAX's
    layer, whose spread is not theirs."""
    by = {(row["frontend"], row["peer"], row["case"].get("clock")): row for row in rows}
    if recorded := by.get(("torch", PLAIN, "in a row")):
        return recorded
    plain, ours = (by.get(("jax", peer, None)) for peer in (PLAIN, "torch_frontend"))
    single = by.get(("torch", PLAIN, None))
    if not (plain and ours and single):
        return None
    us, peer_us = ours["peer_us"], plain["peer_us"]
    return {**single, "us": us, "peer_us": peer_us, "ratio": peer_us / us, "n": ours["n"], "spread": None}


def peaks(row: Row) -> str:
    """GiB of the plain layer and of ours; a dash for the plain layer of older lines, "" without either."""
    found = [f"{peak / 2**30:.1f}" if peak else "-" for peak in map(row.get, ("peer_peak_nbytes", "peak_nbytes"))]
    return " / ".join(found) if found != ["-", "-"] else ""


def _samples(row: Row) -> str:
    return f"{row['n']}, {row['spread']:.0%}" if row["spread"] is not None else f"{row['n']}"


def _times(row: Row | None) -> tuple[str, str]:
    """Both times with their samples, and the ratio."""
    if not row:
        return "", ""
    return f"{row['peer_us'] / 1e3:.2f} / {row['us'] / 1e3:.2f} ({_samples(row)})", f"{row['ratio']:.2f}x"


def _cells(rows: list[Row]) -> tuple[str, ...]:
    by = {(row["frontend"], row["peer"]): row for row in rows if not row["case"].get("clock")}
    single, jax, ragged = (by.get(key) for key in (("torch", PLAIN), ("jax", PLAIN), ("jax", "ragged_dot")))
    any_ = single or rows[0]
    return (
        _layer(any_),
        _sizes(any_),
        _how(any_),
        *_times(in_a_row(rows)),
        *_times(single),
        f"{jax['us'] / 1e3:.2f} ({_samples(jax)})" if jax else "",
        f"{jax['ratio']:.2f}x" if jax else "",
        f"{ragged['ratio']:.2f}x" if ragged else "",
        f"{any_['error']['sqnr_db']}",
        peaks(any_),
    )


def table(rows: list[Row], other: Sequence[Row] = ()) -> str:
    """The section, with the lines of another GPU in a table of their own; "" without lines."""
    if not rows:
        return ""
    text = [
        "## The MoE layer, on a GPU",
        "",
        f"{machine(rows)}, recipe `{rows[0]['case']['recipe']}`. Times are medians of n samples of one run; spread is "
        "(p90 - p10) / median.",
        "",
        "- *bf16*, the baseline: an unfused layer of router, top-k, stable sort, gather, three `torch._grouped_mm`, "
        "compiled SwiGLU and weighted scatter-add ([source](../../benchmarks/peers/moe_layer.py)).",
        "- *speedup*: time of the baseline divided by the time of mxep.",
        "- *back to back*: steps without a pause, as in training, after 0.25 s of such steps. JAX is compared in this "
        "way, with the same baseline in torch.",
        "- *single step*: one step after a pause, with cold caches. CUDA-graph rows replay both sides.",
        "- *weights*: quantized in every step, or quantized once and *cached*.",
        "- *dB*: SQNR of the worst of y and all gradients against the baseline, with the same choice of experts.",
        "- *one expert*: one expert gets 30% of the rows (12.5% with top-8, the maximum). *dirichlet*: the popularity "
        "of experts is a draw of Dirichlet(1, ..., 1). Other layers have the groups of a random router.",
        "- *`jax.lax.ragged_dot` / JAX*: time of a JAX layer on `ragged_dot` divided by the time of mxep in JAX. XLA "
        "writes dense operands for it. Empty: the operands exceed the memory, or it was not measured.",
        "",
        *_lines(rows),
        *_against_recipe_bf16(rows),
    ]
    if other:
        text += ["", f"{machine(list(other))}:", "", *_lines(other)]
    return "\n".join(text)


def _lines(rows: Sequence[Row]) -> list[str]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((_layer(row), _sizes(row), _how(row)), []).append(row)
    return [
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(_cells(of_one))} |" for of_one in sorted(groups.values(), key=lambda rows: rows[0]["op"])),
    ]


def _against_recipe_bf16(rows: Sequence[Row]) -> list[str]:
    """The torch layer against itself without quantization, from the run of the other table; [] without lines."""
    steps = [row for row in rows if row["frontend"] == "torch" and row["case"].get("clock")]
    plain = {(row["op"], str(row["case"])): row for row in steps if row["peer"] == PLAIN}
    cells = []
    for row in sorted((row for row in steps if row["peer"] == RECIPE_BF16), key=lambda row: row["op"]):
        other = plain[row["op"], str(row["case"])]
        joules = [other.get("peer_joules"), row.get("peer_joules"), row.get("joules")]
        shown = " / ".join(f"{spent:.1f}" for spent in joules if spent) if all(joules) else ""
        cells.append((_layer(row), _sizes(row), _how(row), *_times(row), shown, peaks(row)))
    if not cells:
        return []
    head = [column.format(recipe=f"recipe `{rows[0]['case']['recipe']}`") for column in OWN_COLUMNS]
    return [
        "",
        "Recipe `bf16` is the same layer of mxep without quantization, in the same run: what MXFP8 itself gains.",
        "",
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(of_one)} |" for of_one in cells),
        *([] if (least := rows_to_gain(rows)) is None else ["", GAIN.format(least)]),
    ]


GAIN = (
    "With weights quantized in every step, MXFP8 gains in a CUDA graph from about {} rows per expert: tokens times k, "
    "divided by the experts. A line through the two layers with the fewest rows gives this number, of the time gained "
    "per weight. In eager PyTorch the layer with the fewest rows waits for the host."
)


def rows_to_gain(rows: Sequence[Row], more_bytes: float = 0) -> int | None:
    """Rows per expert from which recipe mxfp8 is faster than recipe bf16, to tens; None without lines of two sizes.

    Floors of bytes do not depend on the rows, and floors of operations grow with them: the time that a weight gains is
    a line in the rows, where products are bound by bytes or little above. more_bytes: what a step reads and writes for
    each weight beyond the measured step, at the rate of copies; then the result is computed, not measured."""
    points = []
    for row in rows:
        case = row["case"]
        usual = case["recipe"] == "mxfp8" and case.get("launch") == "graph" and "weights" not in case
        if usual and row["op"] == "moe_layer_fwd_bwd" and row["peer"] == RECIPE_BF16 and case.get("clock"):
            weights = 3 * case["num_experts"] * case["dim"] * case["hidden_dim"]
            gain = (row["peer_us"] - row["us"]) / weights - more_bytes / BYTES_PER_S * 1e6
            points.append((case["tokens"] * case["top_k"] / case["num_experts"], gain))
    if len(points) < 2:
        return None
    (fewest, gain), (more, larger) = sorted(points)[:2]
    return 10 * round((fewest - gain * (more - fewest) / (larger - gain)) / 10) if larger > gain else None
