"""The table of the whole MoE layer on a GPU."""

from collections.abc import Sequence
from typing import Any

from .table_ops import machine

Row = dict[str, Any]
NAMES = {"moe_layer_fwd": "forward", "moe_layer_fwd_bwd": "forward and backward"}
COLUMNS = ("layer", "tokens, D, F, experts, k", "weights", "plain torch bf16, ms", "torch, ms (spread)", "speed-up",
           "in a row", "JAX, ms", "JAX speed-up", "`jax.lax.ragged_dot` / JAX", "peak memory, torch")  # fmt: skip


def is_layer(op: str) -> bool:
    return op in NAMES


def _sizes(row: Row) -> str:
    return ", ".join(str(row["case"][name]) for name in ("tokens", "dim", "hidden_dim", "num_experts", "top_k"))


def _layer(row: Row) -> str:
    routing = row["case"].get("routing")
    return f"{NAMES[row['op']]}, {routing.replace('_', ' ')}" if routing else NAMES[row["op"]]


def _how(row: Row) -> str:
    how = "held" if row["case"].get("weights") else "quantized in every step"
    return f"{how}, in a CUDA graph" if row["case"].get("launch") else how


def _in_a_row(by: dict[tuple[str, str, str | None], Row]) -> str:
    """The speed-up of torch's layer where steps follow each other: recorded, or by the lines that compare with JAX."""
    recorded = by.get(("torch", "plain_torch_bf16", "in a row"))
    if recorded:
        return f"{recorded['ratio']:.2f}x"
    plain, ours = (by.get(("jax", peer, None)) for peer in ("plain_torch_bf16", "torch_frontend"))
    return f"{plain['peer_us'] / ours['peer_us']:.2f}x" if plain and ours else ""


def _cells(rows: list[Row]) -> tuple[str, ...]:
    by = {(row["frontend"], row["peer"], row["case"].get("clock")): row for row in rows}
    ours, jax, ragged = (by.get((*key, None)) for key in (("torch", "plain_torch_bf16"), ("jax", "plain_torch_bf16"),
                                                          ("jax", "ragged_dot")))  # fmt: skip
    any_ = rows[0]
    peak: int | None = ours["peak_nbytes"] if ours else None
    return (
        _layer(any_),
        _sizes(any_),
        _how(any_),
        f"{ours['peer_us'] / 1e3:.2f}" if ours else "",
        f"{ours['us'] / 1e3:.2f} ({ours['spread']:.0%})" if ours else "",
        f"{ours['ratio']:.2f}x" if ours else "",
        _in_a_row(by),
        f"{jax['us'] / 1e3:.2f}" if jax else "",
        f"{jax['ratio']:.2f}x" if jax else "",
        f"{ragged['ratio']:.2f}x" if ragged else "",
        f"{peak / 2**30:.1f} GiB" if peak else "",
    )


def table(rows: list[Row], other: Sequence[Row] = ()) -> str:
    """The section, with the lines of another GPU in a table of their own; "" without lines."""
    if not rows:
        return ""
    text = [
        "## The MoE layer, on a GPU",
        "",
        f"{machine(rows)}, recipe `{rows[0]['case']['recipe']}`. Times are medians of one run. The "
        "output and all gradients are compared with the bf16 layer, in dB, before timing.",
        "",
        "- *plain torch bf16*: router, top-k, stable sort, gather, three `torch._grouped_mm`, compiled SwiGLU, "
        "weighted scatter-add ([source](../benchmarks/peers/moe_layer.py)).",
        "- *speed-up*: time of the plain layer divided by our time, of a step behind a pause with cold caches; in a "
        "CUDA graph both are replayed.",
        "- *one expert*: 30% of the rows are of one expert, of top-8 an eighth; *dirichlet*: the popularity of experts "
        "is a draw of Dirichlet(1, ..., 1). Other layers have the groups of a random router.",
        "- *in a row*: the same of steps that follow each other, as in training, after 0.25 s of such steps. JAX is "
        "compared in this way.",
        "- *`jax.lax.ragged_dot` / JAX*: time of the plain JAX layer divided by our time in JAX; empty where "
        "XLA's dense operands exceed the memory.",
        "",
        *_lines(rows),
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
