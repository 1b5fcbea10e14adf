"""Inputs of the model of expert parallelism and measurements to compare it with: recorded rates and times of pipelines.

results/h200.jsonl, h200_ep_in_turn/, h200_exchange_probe/ --> rates
results/h200_ep.jsonl, h200_ep_in_turn/ --> measured
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from mxep.core_kernels.peer.programs.writer import RESERVED
from mxep.core_kernels.policy.recipe import Recipe

from ..ep_model import Case, Copies, Rates, backward, backward_program, forward, forward_program, plain, run
from .results import RESULTS, newest

FOLDER, PROBE = RESULTS / "h200_ep_in_turn", RESULTS / "h200_exchange_probe"
GPUS = 8
"""Of a host."""
NETWORK = 40.9e9
"""Bytes/s out of each GPU between hosts: two hosts of eight H200, InfiniBand of 400 Gb/s per GPU, a dispatch of bf16
rows (deepseek-ai/DeepEP, issue 493)."""
FEW = 8
"""SMs on which pulls and pushes were timed too: the kernel is the limit there, or nearly the link."""
PRODUCTS = {"grouped_mm_fwd": "forward", "grouped_mm_dgrad": "dgrad", "grouped_mm_wgrad": "wgrad"}
OVERLAPPED = "peer memory, in a graph"
WITHOUT_OVERLAP = ("643ebc3", "e65087e")
"""Commits whose lines of one GEMM are over peer memory without overlap."""


@cache
def _lines() -> tuple[dict[str, Any], ...]:
    return tuple(row for row in newest("h200") if row["frontend"] == "torch")


def _copies(what: str, dim: int, hidden: int) -> Copies:
    """The rates of "pull" or "push" in the study of SMs, of the size nearest to dim x hidden."""
    rows = [json.loads(text) for text in (PROBE / "lines.jsonl").read_text().splitlines()]
    size = min((r["size"] for r in rows), key=lambda text: abs(_product_of(text) - dim * hidden))
    rows = [r for r in rows if r["size"] == size]
    (during,) = (r for r in rows if r["what"].endswith(f" a {what}") and r["reserved"] == RESERVED)
    few = max(r["gb_s"] for r in rows if r["what"] == what and r["ctas"] == FEW)
    return Copies(during["wire_gb_s"] * 1e9, few * RESERVED / FEW * 1e9, during["of_132"])


def _product_of(size: str) -> int:
    dim, hidden = map(int, size.split("/"))
    return dim * hidden


@cache
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
    nccl = json.loads((FOLDER / "wire.json").read_text())["nccl"] * 1e9
    pull, push = (_copies(what, dim, hidden) for what in ("pull", "push"))
    return Rates(products, passes, nccl, NETWORK, GPUS, pull, push)


class Measured(NamedTuple):
    """how: "bf16", "in turn" or OVERLAPPED. milliseconds: forward, and with its backward."""

    case: Case
    how: str
    milliseconds: tuple[float, float]


def measured(recorded: Iterable[Mapping[str, Any]]) -> Iterator[Measured]:
    """Of recorded lines of `python -m benchmarks ep`; cases that they lack from h200_ep_in_turn. A run over peer memory
    counts where the device drives it."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in recorded:
        c, step = row["case"], row["op"] == "ep_fwd_bwd"
        if c.get("routing", "balanced") != "balanced":
            continue
        for how, us in ((c["how"], row["us"]), ("bf16", row["peer_us"])):
            if how == OVERLAPPED and row["commit"].startswith(WITHOUT_OVERLAP):
                continue
            recipe = "mxfp8" if how == "bf16" else c["recipe"]
            key = c["ranks"], c["rows"], c["dim"], c["hidden"], c["experts"], recipe, how
            found.setdefault(key, [0.0, 0.0])[step] = us / 1e3
    for text in (FOLDER / "lines.jsonl").read_text().splitlines():
        c = json.loads(text)
        for how, name in ((c["how"], ""), ("bf16", "bf16_")):
            key = c["ranks"], c["rows"], c["dim"], c["hidden"], c["experts"], c["recipe"], how
            found.setdefault(key, [c[f"{name}fwd_ms"], c[f"{name}fwd_bwd_ms"]])
    for (ranks, rows, dim, hidden, experts, recipe, how), (one, both) in sorted(found.items()):
        case = Case(ranks, rows, dim, hidden, experts, Recipe.parse(recipe))
        if how in ("bf16", "in turn") or (how == OVERLAPPED and case.overlaps(GPUS)):
            yield Measured(case, how, (one, both))


def compute(case: Case, how: str) -> tuple[float, float]:
    """Modelled milliseconds of the forward, and with its backward. how: as of `Measured`."""
    found = rates(case.dim, case.hidden)
    if how == "bf16":
        one, two = plain(case, found)
    elif how == "in turn":
        one, two = (sum(stages) for stages in (forward(case, found), backward(case, found)))
    else:
        one, two = (run(of, found) for of in (forward_program(case, found), backward_program(case, found)))
    return one * 1e3, (one + two) * 1e3
