"""Inputs of the model of expert parallelism and measurements to compare it with: recorded rates and times of pipelines.

results/h200.jsonl, h200_ep_in_turn/ --> rates
results/h200_ep.jsonl, h200_ep_in_turn/ --> measured
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from mxep.core_kernels.policy.recipe import Recipe

from ..ep_model import Case, Rates, backward, forward, in_turn, overlapped, plain
from .results import RESULTS, newest

FOLDER = RESULTS / "h200_ep_in_turn"
GPUS = 8
"""Of a host."""
NETWORK = 40.9e9
"""Bytes/s out of each GPU between hosts: two hosts of eight H200, InfiniBand of 400 Gb/s per GPU, a dispatch of bf16
rows (deepseek-ai/DeepEP, issue 493)."""
PULL, PUSH, NARROWED = 256e9, 334e9, 1.11
"""Bytes/s of each direction on 16 multiprocessors during products, of rows of 7168 values, and the time of these
products relative to all multiprocessors and no transfer: results/h200_exchange_probe."""
OVERLAPS_SINCE = "2026-11-28"
"""Of lines: products over peer memory did not overlap before."""
OVER_PEERS = "peer memory, in a graph"
PRODUCTS = {"grouped_mm_fwd": "forward", "grouped_mm_dgrad": "dgrad", "grouped_mm_wgrad": "wgrad"}


@cache
def _lines() -> tuple[dict[str, Any], ...]:
    return tuple(row for row in newest("h200") if row["frontend"] == "torch")


def rates(dim: int, hidden: int) -> Rates:
    """Measured rates of the product whose size is nearest to dim x hidden."""
    rows = [r for r in _lines() if r["case"].get("routing") == "balanced" and r["case"].get("operands") != "bf16"]
    rows = [r for r in rows if {*PRODUCTS, "grouped_mm_exact"} >= {r["op"]}]
    size = lambda r: r["case"]["K"] * r["case"]["N"]  # noqa: E731
    nearest = min(map(size, rows), key=lambda other: abs(other - dim * hidden))
    products = {}
    for r in rows:
        if size(r) == nearest:
            name = PRODUCTS.get(r["op"], "bf16")
            products[name] = r["flops"] / r["us"] * 1e6
            if r["peer"] == "torch_grouped_mm_bf16" and name != "bf16":
                products[f"plain {name}"] = r["flops"] / r["peer_us"] * 1e6
    names = {"permute_mx_fold": "fold"}
    ops = ("quantize_row", "quantize_both_fold", "requantize_col_fold", "permute_mx", "permute_mx_fold", "unpermute",
           "dequantize", "combine")  # fmt: skip
    passes = {
        names.get(r["op"], r["op"]): r["nbytes"] / r["us"] * 1e6
        for r in _lines()
        if r["op"] in ops and r["peer"] == "copy" and r["case"].get("direction") != "bwd"
    }
    collectives = json.loads((FOLDER / "wire.json").read_text())["nccl"] * 1e9
    return Rates(products, passes, PULL, PUSH, NARROWED, collectives, NETWORK, GPUS)


class Measured(NamedTuple):
    """how: "bf16", "in turn" or OVER_PEERS. milliseconds: forward, and with its backward."""

    case: Case
    how: str
    milliseconds: tuple[float, float]


def measured(recorded: Iterable[Mapping[str, Any]]) -> Iterator[Measured]:
    """Of recorded lines of `python -m benchmarks ep`; cases that they lack from h200_ep_in_turn."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in recorded:
        c, step = row["case"], row["op"] == "ep_fwd_bwd"
        if c.get("routing", "balanced") != "balanced":
            continue
        if c["how"] == OVER_PEERS and row["date"] < OVERLAPS_SINCE:
            continue
        for how, us in ((c["how"], row["us"]), ("bf16", row["peer_us"])):
            recipe = "mxfp8" if how == "bf16" else c["recipe"]
            key = c["ranks"], c["rows"], c["dim"], c["hidden"], c["experts"], recipe, how
            found.setdefault(key, [0.0, 0.0])[step] = us / 1e3
    for text in (FOLDER / "lines.jsonl").read_text().splitlines():
        c = json.loads(text)
        for how, name in ((c["how"], ""), ("bf16", "bf16_")):
            key = c["ranks"], c["rows"], c["dim"], c["hidden"], c["experts"], c["recipe"], how
            found.setdefault(key, [c[f"{name}fwd_ms"], c[f"{name}fwd_bwd_ms"]])
    for (ranks, rows, dim, hidden, experts, recipe, how), (one, both) in sorted(found.items()):
        if how in ("bf16", "in turn", OVER_PEERS):
            yield Measured(Case(ranks, rows, dim, hidden, experts, Recipe.parse(recipe)), how, (one, both))


def modelled(of: Measured) -> tuple[float, float]:
    """Milliseconds of the forward, and with its backward."""
    case, found = of.case, rates(of.case.dim, of.case.hidden)
    if of.how == "bf16":
        one, two = plain(case, found)
    else:
        total = in_turn if of.how == "in turn" else overlapped
        one, two = total(forward(case, found)), total(backward(case, found))
    return one * 1e3, (one + two) * 1e3
